"""A Flower app in the shape of the baseline fedbn."""
