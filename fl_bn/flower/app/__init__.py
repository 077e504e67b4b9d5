"""Provide what the application adds to a round: the ClientApp, client state, checkpoints, and the reports."""
