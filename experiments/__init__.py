"""Run the papers' experiments, and judge their claims: a tool of this repository, in no wheel.

``definitions`` has sweep files and programs, ``claims.toml`` has the papers' claims, ``results`` has finished cells.
"""
