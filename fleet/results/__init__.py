"""`imagefleet results`: what became of each job of a campaign."""
