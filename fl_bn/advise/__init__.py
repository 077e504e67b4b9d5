"""Advise which method suits a user's clients: measure them, and compare them with the regimes of the map.

``measure``: the clients in numbers. ``regimes``: the map and its nearest regime. ``pilot``: short runs on validation
samples that choose among candidates. ``report``: the result as files.
"""
