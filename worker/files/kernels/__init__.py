"""Compiled kernels that travel: packed once, fetched by workers of the same GPU and versions."""
