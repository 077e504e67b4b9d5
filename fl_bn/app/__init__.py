"""Configure a run, build its objects, and write its records, pictures and summary."""
