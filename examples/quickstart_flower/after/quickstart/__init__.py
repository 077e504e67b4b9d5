"""Flower's PyTorch quickstart as an app of its own."""
