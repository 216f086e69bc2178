"""The ground floor: what a job is, where jobs wait and where images go. Imports no other room."""
