"""What the application adds to a round: the ClientApp, what it keeps, checkpoints, the reports of layers and disclosures."""
