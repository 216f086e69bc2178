"""The embedded storage: one SQLite file of queues and a folder of images."""
