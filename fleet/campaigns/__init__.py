"""Campaigns: what a command acts on, their numbers, one of their jobs, and `imagefleet cancel`."""
