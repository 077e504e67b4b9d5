"""Run the commands of ``fl-bn experiments`` as ``python -m experiments``."""

from experiments.cli import experiments

experiments()
