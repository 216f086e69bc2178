"""Model families: all that differs between Stable Diffusion's versions."""
