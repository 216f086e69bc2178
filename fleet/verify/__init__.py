"""`imagefleet verify`: images that two workers drew are compared, and who draws wrong is named."""
