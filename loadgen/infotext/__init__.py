"""The texts in pictures of other programs, read as jobs that draw the pictures again."""
