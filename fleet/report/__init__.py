"""`imagefleet report`: what a campaign came to."""
