"""A Flower app in the shape of quickstart-pytorch."""
