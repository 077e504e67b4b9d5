"""Provide experiments that are no sweeps: each is a function of a folder (``experiments/catalogue.py``)."""
