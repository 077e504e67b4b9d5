"""Advise which method suits a user's clients.

The *map* holds the results of all methods in several *regimes*, which are kinds of federations. ``measure`` describes
the user's clients in numbers. ``regimes`` finds the most similar regime of the map, whose best methods are the
candidates. ``pilot`` chooses among them by short runs on validation samples. ``report`` writes the advice to files.
"""
