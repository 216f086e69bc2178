"""`imagefleet report`: the figures of a campaign."""
