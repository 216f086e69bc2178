"""What a worker does on SaladCloud: its metadata service, reallocation, deletion cost."""
