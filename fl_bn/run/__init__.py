"""Provide everything around a run: its configuration, records, pictures and comparisons."""
