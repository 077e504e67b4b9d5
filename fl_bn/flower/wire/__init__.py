"""Flower's messages: their format, their checks, sending and receiving, and the gate of a client's app."""
