"""Image data, its division among clients, and the batches a client draws from its share."""
