"""What jobs are given beside prompts: images, masks, files of upscalers and ControlNets."""
