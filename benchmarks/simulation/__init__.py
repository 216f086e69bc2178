"""A fleet in simulated time: the worker's own pipeline, on stand-ins for GPUs and Azure."""
