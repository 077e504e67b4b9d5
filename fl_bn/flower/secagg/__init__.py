"""Secure aggregation over Flower: its SecAgg+ protocol, and the vectors that it sums."""
