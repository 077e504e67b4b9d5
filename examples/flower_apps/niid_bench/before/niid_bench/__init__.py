"""A Flower app with the structure of Flower's baseline niid_bench."""
