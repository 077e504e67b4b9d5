"""Run the commands of the papers' experiments: ``python -m experiments``."""

from experiments.cli import experiments

experiments(prog_name="python -m experiments")
