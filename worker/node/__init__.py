"""Checks that a node can do its work, before and while it works."""
