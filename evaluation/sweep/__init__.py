"""`imagefleet sweep`: captions in all combinations of settings, as one campaign."""
