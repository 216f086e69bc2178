"""Prices of GPUs and storage, and the speed of each GPU."""
