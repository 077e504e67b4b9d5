"""Check what separate machines need, beside the checks of every machine in ``fl_bn.checks``."""
