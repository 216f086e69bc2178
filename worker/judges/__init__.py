"""What judges the images that a worker has drawn, before they are stored."""
