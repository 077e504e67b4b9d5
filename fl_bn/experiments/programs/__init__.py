"""Experiments that are no sweeps: each a function of a folder (``fl_bn/sweep/experiments.py``)."""
