"""The files that workers read from the storage: their kinds, and what their headers say."""
