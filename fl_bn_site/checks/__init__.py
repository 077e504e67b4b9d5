"""Check what only a deployment on separate machines needs. Checks for every machine are in ``fl_bn.checks``."""
