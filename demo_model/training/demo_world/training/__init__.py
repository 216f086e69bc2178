"""Trains the demo checkpoint, its LoRAs and the judge."""
