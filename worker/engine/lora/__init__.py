"""LoRA files: their formats, their key names, and merging them into weights."""
