"""Run ``python -m experiments``: the commands of ``fl-bn experiments``."""

from experiments.cli import experiments

experiments()
