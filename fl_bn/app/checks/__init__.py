"""Check every machine before a run: ``fl-bn doctor``.

The checks look at packages, memory, clock, the run config, the data and the model.
"""
