"""Run the papers' experiments, and judge the papers' claims by their results.

This package is a tool of the repository, and is not part of the wheel. ``definitions`` has the sweep files and
programs of the experiments, and the register of claims, ``claims.toml``. ``results`` has the results of finished
runs.
"""
