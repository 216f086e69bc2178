"""The commands that measure: `score`, `gate` and `bench`."""
