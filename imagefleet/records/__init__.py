"""Records of how each job ended, in shards beside the images, written as workers go."""
