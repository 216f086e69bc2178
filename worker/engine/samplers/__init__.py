"""Samplers and their schedules, as tables of the one update in `worker.engine.sampler`."""
