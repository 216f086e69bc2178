"""HTTP servers for strangers: what each connection and each body may cost."""
