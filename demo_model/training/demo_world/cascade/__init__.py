"""Trains the demo's cascade in pixels, and measures how well it draws."""
