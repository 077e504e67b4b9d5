"""Hold the ServerApp that Flower loads."""
