"""Secure aggregation: Flower's SecAgg+ over this project's messages, and what goes into one sum."""
