"""Synthetic data in the shape of five data sets of digits, each with a brightness and contrast of its own."""

import torch
from torch.utils.data import DataLoader, TensorDataset

NAMES = ("MNIST", "SVHN", "USPS", "SynthDigits", "MNIST-M")


def made(samples, seed, style):
    """Make noisy colour pictures, with one pattern for each class. The style is the data set's brightness and contrast."""
    patterns = torch.randn(10, 3, 28, 28, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(10, (samples,), generator=generator)
    images = patterns[labels] + 0.5 * torch.randn(samples, 3, 28, 28, generator=generator)
    return TensorDataset(images * (0.5 + style) + style, labels)


def get_data(partition_id):
    """Return the client's data, and the name of the data set to which they belong."""
    name = NAMES[partition_id % len(NAMES)]
    style = 0.5 * NAMES.index(name)
    train, test = made(64, 1 + partition_id, style), made(32, 1001 + partition_id, style)
    trainloader = DataLoader(train, batch_size=16, shuffle=True, generator=torch.Generator().manual_seed(partition_id))
    return trainloader, DataLoader(test, batch_size=32), name
