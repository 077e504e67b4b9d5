"""The papers' experiments and what became of their claims: a tool of this repository, in no wheel.

``definitions`` are sweep files and programs, ``claims.toml`` is what the papers claim, ``results`` are cells that were run.
"""
