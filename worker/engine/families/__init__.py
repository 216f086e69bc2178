"""Model families: all that differs between Stable Diffusion 1.x, 2.x and XL, a file each."""
