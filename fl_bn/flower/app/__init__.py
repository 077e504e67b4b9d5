"""Provide the parts of the application around a round: ClientApp, client state, checkpoints, disclosures and log lines."""
