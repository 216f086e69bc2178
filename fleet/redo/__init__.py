"""`imagefleet redo`: images that may be wrong are drawn again, and replaced."""
