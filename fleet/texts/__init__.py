"""`imagefleet text`: what a text encoder says of jobs' prompts, for stages that have none."""
