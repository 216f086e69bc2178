"""Trains a small FLUX.2-klein on the demo's world, and measures how well it draws."""
