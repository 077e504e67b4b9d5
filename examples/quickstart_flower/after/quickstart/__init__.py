"""A Flower app with the structure of Flower's PyTorch quickstart."""
