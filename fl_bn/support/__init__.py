"""Provide small tools without any federated learning: files, locks, names, imports, texts from other machines."""
