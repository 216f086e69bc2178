"""The kinds of networks whose features are compared."""
