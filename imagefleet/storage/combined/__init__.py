"""Several queues of a storage as one: by priority and model, or the shards of one."""
