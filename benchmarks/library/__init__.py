"""The engine as a library, and the gateway, against the worker on the same jobs."""
