"""Read, check, send and receive Flower's messages, and decide who may send which."""
