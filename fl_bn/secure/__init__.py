"""Provide secure aggregation in plain torch: statistics that can be summed, privacy, and the settings."""
