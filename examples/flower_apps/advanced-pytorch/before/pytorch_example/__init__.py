"""A Flower app in the shape of advanced-pytorch."""
