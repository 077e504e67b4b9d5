"""Check the certificates, keys and network of a deployment on separate machines. ``fl_bn.checks`` has the other checks."""
