"""`imagefleet demo`: jobs, worker and images on this machine, without an account or a GPU."""
