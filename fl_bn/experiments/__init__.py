"""The papers' experiments: sweep files, and in ``programs`` those that are no sweeps."""
