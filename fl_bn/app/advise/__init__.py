"""Measure a user's clients, and find the kind of federation that is most like them on the *map*.

The map holds the results of all methods in several *regimes*, which are kinds of
federations.
"""
