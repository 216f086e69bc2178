"""Rows of benchmarks, each measured by a process of its group, and their results."""
