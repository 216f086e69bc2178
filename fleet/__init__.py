"""The operator's console: one command, `imagefleet`. Each command is imported when it runs."""
