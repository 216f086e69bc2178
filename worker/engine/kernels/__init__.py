"""Fast layers, and functions compiled and recorded as CUDA graphs."""
