"""Provide small tools without federated learning: files, locks, names, imports, texts."""
