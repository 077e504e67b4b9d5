"""The ClientApp that Flower loads."""
