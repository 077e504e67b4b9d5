"""Synthetic data in the shape of CIFAR-10, with few classes for each client."""

import torch
from torch.utils.data import DataLoader, TensorDataset


def made(samples, seed, labels):
    """Make noisy pictures, with one pattern for each class."""
    patterns = torch.randn(10, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    y = labels[torch.randint(len(labels), (samples,), generator=generator)]
    return TensorDataset(patterns[y] + torch.randn(samples, 3, 32, 32, generator=generator), y)


def load_datasets(partition_id, classes_per_client):
    labels = (torch.arange(classes_per_client) + partition_id * classes_per_client) % 10
    trainloader = DataLoader(
        made(64, 1 + partition_id, labels), batch_size=16, shuffle=True, generator=torch.Generator().manual_seed(partition_id)
    )
    return trainloader, DataLoader(made(32, 1001 + partition_id, labels), batch_size=32)


def load_test():
    return DataLoader(made(100, 2001, torch.arange(10)), batch_size=100)
