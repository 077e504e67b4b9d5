"""Provide secure aggregation in plain torch: summable statistics, privacy, settings."""
