"""Measurements of the cascade in pixels."""
