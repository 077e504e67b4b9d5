"""State for how many days certificates are valid."""

SERVER_DAYS = 90
"""Days for which a server's certificate is valid by default. A stolen key that nobody misses is of use no longer than that."""

SOON = 30
"""A certificate that expires in fewer days is renewed, or a warning is given."""
