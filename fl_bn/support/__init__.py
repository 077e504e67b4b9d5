"""Small tools that know nothing of federated learning: files, locks, names, imports, texts from outside."""
