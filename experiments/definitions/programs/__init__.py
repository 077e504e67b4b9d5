"""Experiments that are no sweeps: each a function of a folder (``experiments/catalogue.py``)."""
