"""Passes: start images, hires fix, refiners, ControlNets and upscalers."""
