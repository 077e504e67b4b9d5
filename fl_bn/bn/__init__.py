"""Batch normalisation in a network: layers, their statistics, and the part that each tensor plays."""
