"""The passes of a job: what its image begins with, what controls it, and the second one."""
