"""State for how many days certificates are valid."""

SERVER_DAYS = 90
"""Days for which a server's certificate is valid by default. Nobody can use a stolen server key for longer than that."""

MOST_DAYS = 36_500
"""The most days for which a certificate may be valid: its dates end with the year 9999."""

SOON = 30
"""A certificate that expires within this number of days is renewed, or a warning is given."""
