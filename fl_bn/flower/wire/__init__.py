"""Encode, check, send and receive Flower's messages. The module ``gate`` checks all messages and replies of a client's app."""
