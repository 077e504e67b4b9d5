"""A legacy client, as older Flower apps have it. ``before.py`` and ``after.py`` both use it unchanged."""

from collections import OrderedDict

import numpy as np
import torch
from flwr.client import NumPyClient
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def make_net():
    return nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 10))


def load_data(partition_id, num_partitions):
    x, y = load_digits(return_X_y=True)
    x, y = torch.from_numpy(x).float() / 16, torch.from_numpy(y)
    shuffled = np.random.default_rng(0).permutation(len(y))
    train, test = shuffled[360:], shuffled[:360]
    own = train[np.isin(y[train] * num_partitions // 10, partition_id)]
    return (
        DataLoader(TensorDataset(x[own], y[own]), batch_size=32, shuffle=True, drop_last=True),
        DataLoader(TensorDataset(x[test], y[test]), batch_size=128),
    )


class FlowerClient(NumPyClient):
    def __init__(self, net, trainloader, testloader):
        self.net, self.trainloader, self.testloader = net, trainloader, testloader

    def get_parameters(self, config):
        return [value.cpu().numpy() for value in self.net.state_dict().values()]

    def set_parameters(self, parameters):
        state = OrderedDict((key, torch.tensor(value)) for key, value in zip(self.net.state_dict(), parameters, strict=True))
        self.net.load_state_dict(state, strict=True)

    def fit(self, parameters, config):
        self.set_parameters(parameters)
        optimizer, criterion, losses = torch.optim.SGD(self.net.parameters(), lr=config["lr"]), nn.CrossEntropyLoss(), []
        self.net.train()
        for x, y in self.trainloader:
            optimizer.zero_grad()
            loss = criterion(self.net(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return self.get_parameters({}), len(self.trainloader.dataset), {"loss": float(np.mean(losses))}

    def evaluate(self, parameters, config):
        self.set_parameters(parameters)
        self.net.eval()
        loss, correct, n = 0.0, 0, len(self.testloader.dataset)
        with torch.no_grad():
            for x, y in self.testloader:
                out = self.net(x)
                loss += nn.functional.cross_entropy(out, y, reduction="sum").item()
                correct += (out.argmax(1) == y).sum().item()
        return loss / n, n, {"accuracy": correct / n}


def make_client(context):
    partition_id, num_partitions = context.node_config["partition-id"], context.node_config["num-partitions"]
    return FlowerClient(make_net(), *load_data(partition_id, num_partitions))
