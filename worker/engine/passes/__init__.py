"""What images begin with other than noise: an image, or an earlier pass."""
