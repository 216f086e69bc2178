"""A machine's workers under measurement, for `benchmarks/gpus.py`."""
