"""Compute rounds in plain torch: local training, the server's averaging, its optimiser."""
