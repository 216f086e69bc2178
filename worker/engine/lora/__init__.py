"""LoRA files: their formats, their names, and how they change the weights."""
