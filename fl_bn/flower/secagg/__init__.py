"""Aggregate securely: Flower's SecAgg+ over this project's messages, and the content of a sum."""
