"""A Flower app with the structure of Flower's example quickstart-pytorch."""
