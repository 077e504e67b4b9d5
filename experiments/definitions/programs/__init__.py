"""Run the experiments that are functions, and measure finished runs. ``experiments/catalogue.py`` calls these programs."""
