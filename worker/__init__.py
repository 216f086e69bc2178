"""One process for one GPU: pull, prepare, generate, encode, upload, acknowledge, all at once."""
