"""Commands that watch a fleet: status and exporter."""
