"""Load data, divide them among clients, and draw a client's batches."""
