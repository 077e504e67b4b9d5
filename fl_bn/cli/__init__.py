"""Define the commands, one file per group."""
