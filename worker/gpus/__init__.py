"""Several GPUs of one machine: a worker process for each, under one parent without torch."""
