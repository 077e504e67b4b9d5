"""Which method for a problem: what a user's clients have is measured, and compared with the regimes of the map.

``measure``: the clients in numbers. ``regimes``: the map, and what it says of the nearest regime. ``pilot``: short runs on validation
samples that choose among candidates. ``report``: the result as files.
"""
