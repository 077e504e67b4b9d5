"""Encode, check, send and receive Flower's messages. All of a client's app pass through ``gate``."""
