"""`imagefleet campaigns`, `job`, `cancel` and `purge`."""
