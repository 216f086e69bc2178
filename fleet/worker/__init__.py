"""`imagefleet worker`: one process per GPU, and its live line on a terminal."""
