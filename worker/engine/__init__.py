"""Everything that imports torch. Knows nothing of queues, blobs or jobs' ids."""
