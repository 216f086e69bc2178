"""`imagefleet files`: what jobs and workers read from the storage, of each kind."""
