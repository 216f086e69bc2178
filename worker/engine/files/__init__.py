"""Reading the files that jobs name: each once, and untrusted."""
