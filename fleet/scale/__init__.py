"""`imagefleet scale`: as many replicas as the queue needs."""
