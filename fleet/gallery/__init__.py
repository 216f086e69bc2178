"""`imagefleet gallery`: a page on this machine that shows a campaign's images as they arrive."""
