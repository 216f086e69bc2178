"""The commands that measure: `sweep`, `score`, `gate` and `bench`."""
