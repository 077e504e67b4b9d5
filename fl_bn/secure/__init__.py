"""Secure aggregation in plain torch: statistics as additive sums, their cost in privacy, and settings."""
