"""What measures: images by their features, settings against each other, and speed."""
