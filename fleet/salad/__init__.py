"""`imagefleet deploy`: a fleet on SaladCloud."""
