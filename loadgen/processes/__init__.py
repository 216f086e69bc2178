"""Several processes that send what one makes: one alone is at the limit of its core."""
