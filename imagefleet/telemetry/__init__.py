"""Logs, metrics and probes of a long-running process."""
