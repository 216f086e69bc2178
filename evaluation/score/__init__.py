"""`imagefleet score`: FID, KID, CLIP score and CMMD of a campaign's images."""
