"""`imagefleet plan`: time, cost and replicas of a batch."""
