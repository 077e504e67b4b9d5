"""The ServerApp that Flower loads."""
