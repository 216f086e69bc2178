"""The load generator: templates and files of jobs fill a queue."""
