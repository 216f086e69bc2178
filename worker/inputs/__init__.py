"""Inputs of jobs beside their prompts: images, masks, files of upscalers and ControlNets."""
