"""Compute rounds in plain torch: with the local training loop, the server's averaging, and the server's optimiser."""
