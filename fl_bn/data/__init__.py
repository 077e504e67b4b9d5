"""Load data, divide them among clients, and draw the batches of a client from its share."""
