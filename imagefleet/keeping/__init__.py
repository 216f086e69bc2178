"""What a campaign keeps of the images that it draws."""
