"""Encode, check, send and receive Flower's messages."""
