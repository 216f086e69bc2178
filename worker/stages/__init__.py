"""The stages of a job's way through a worker."""
