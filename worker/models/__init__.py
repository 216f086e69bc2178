"""The models of a worker: which they are, when it changes from one to another, and how."""
