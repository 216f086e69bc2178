"""Jobs: the message, the prompt syntax, the samplers."""
