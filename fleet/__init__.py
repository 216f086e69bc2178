"""The operator's console: one command, `imagefleet`. A command imports only the rooms it needs."""
