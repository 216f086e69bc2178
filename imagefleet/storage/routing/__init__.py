"""Routing of jobs by priority, model and shard to plain queues of the storage."""
