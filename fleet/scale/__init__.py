"""`imagefleet scale`: sets the replicas by the queue."""
