"""What became of each job: records in shards beside the images, written as workers go."""
