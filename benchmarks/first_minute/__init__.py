"""A node's first minutes, measured on one card: `measure.py`."""
