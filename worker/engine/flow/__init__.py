"""Flow-matching transformers in slots: FLUX.2-klein, and what follows it."""
