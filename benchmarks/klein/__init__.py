"""Measurements of FLUX.2-klein, and a tiny one of its architecture."""
