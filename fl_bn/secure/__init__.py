"""Provide secure aggregation in plain torch: statistics in a form that can be summed, differential privacy, and the settings."""
