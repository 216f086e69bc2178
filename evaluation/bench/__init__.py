"""`imagefleet bench`: measures the speed of this machine."""
