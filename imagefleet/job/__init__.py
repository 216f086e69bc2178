"""What a job is: its message, its prompt language, its samplers."""
