"""The drawn world: its pictures and captions, the demo checkpoint's training, and the judge."""
