"""Sweeps over the run config, and the papers' experiments, which are sweeps with a table to compare with."""
