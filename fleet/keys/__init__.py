"""`imagefleet keys`: SAS tokens with the least permissions."""
