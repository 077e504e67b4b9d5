"""The experiments that are functions, and the programs that measure finished runs (``experiments/catalogue.py``)."""
