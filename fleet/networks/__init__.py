"""`imagefleet upscaler` and `imagefleet controlnet`: files that jobs name in a field."""
