"""Run sweeps: runs whose run configs are all combinations of values on axes."""
