"""The operator's console: one command, `imagefleet`. Rooms are imported when a command needs them."""
