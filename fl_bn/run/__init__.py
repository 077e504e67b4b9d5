"""Configuration, records, pictures and comparisons: everything around a run."""
