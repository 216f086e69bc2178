"""Prompt templates become a stream of jobs, and the stream a filled queue."""
