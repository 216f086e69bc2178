"""What GPUs and storage cost, and how fast each GPU is."""
