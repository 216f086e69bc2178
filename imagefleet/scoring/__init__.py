"""The figures of `imagefleet score`, as reports and files show them."""
