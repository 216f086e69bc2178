"""`imagefleet bench`: how fast this machine is."""
