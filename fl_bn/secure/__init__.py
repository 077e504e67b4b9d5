"""Secure aggregation in plain torch: how sums are made additive, what they cost in privacy, and their settings."""
