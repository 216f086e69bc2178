"""Diffusion in pixels: the stages of DeepFloyd IF's cascade, in slots."""
