"""Hold the ClientApp that Flower loads."""
