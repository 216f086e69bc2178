"""The slot engine: one UNet call draws a step of every image on the GPU."""
