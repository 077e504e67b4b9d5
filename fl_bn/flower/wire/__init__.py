"""Flower's messages: how records are read, checked, sent and received, and who may send which."""
