"""SD2 and SDXL: tiny checkpoints, and the rows of the families' benchmark."""
