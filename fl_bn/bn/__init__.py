"""Batch normalisation in a network: layers, statistics, and the role of each tensor."""
