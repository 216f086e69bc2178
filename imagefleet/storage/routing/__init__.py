"""Routing of jobs by priority and model to plain queues of the storage."""
