"""`imagefleet deploy salad`: a fleet on SaladCloud."""
