"""Network, data and training of Flower's quickstart, on scikit-learn's digits."""

from functools import cache

import torch
from sklearn.datasets import load_digits
from torch.nn import functional as F

from fl_bn.models import build


def network():
    return build("digits-cnn-small", classes=10, channels=1, image_size=8)


@cache
def data():
    found = load_digits()
    x = torch.tensor(found.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
    return x, torch.tensor(found.target)


def partition(index, count):
    x, y = data()
    return x[index:1437:count], y[index:1437:count]


def train(net, x, y, steps, batch_size, lr):
    net.train()
    optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)
    total = 0.0
    for _ in range(steps):
        chosen = torch.randperm(len(y))[:batch_size]
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x[chosen]), y[chosen])
        loss.backward()
        optimizer.step()
        total += loss.item()
    return total / steps


@torch.no_grad()
def accuracy(net):
    x, y = data()
    net.eval()
    return float((net(x[1437:]).argmax(1) == y[1437:]).float().mean())
