"""Commands that watch a fleet: status, top, exporter."""
