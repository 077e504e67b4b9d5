"""The network, the data and the training loop of a Flower app, in the form of Flower's PyTorch quickstart."""

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
        )
        self.head = nn.Linear(32 * 2 * 2, 10)

    def forward(self, x):
        return self.head(self.features(x).flatten(1))


def load_data(partition_id: int, num_partitions: int, batch_size: int = 32):
    """Load the training data of one client, with two of the ten digits, and test data of all digits."""
    x, y = load_digits(return_X_y=True)
    x, y = torch.from_numpy(x).float().view(-1, 1, 8, 8) / 16, torch.from_numpy(y)
    shuffled = np.random.default_rng(0).permutation(len(y))
    train, test = shuffled[360:], shuffled[:360]
    own = train[np.isin(y[train] * num_partitions // 10, partition_id)]
    trainloader = DataLoader(TensorDataset(x[own], y[own]), batch_size=batch_size, shuffle=True, drop_last=True)
    return trainloader, DataLoader(TensorDataset(x[test], y[test]), batch_size=128)


def train(net, trainloader, epochs, lr, device):
    net.to(device)
    criterion = nn.CrossEntropyLoss().to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)
    net.train()
    running_loss = 0.0
    for _ in range(epochs):
        for images, labels in trainloader:
            optimizer.zero_grad()
            loss = criterion(net(images.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
            running_loss += loss.item()
    return running_loss / (epochs * len(trainloader))


def test(net, testloader, device):
    net.to(device).eval()
    criterion = nn.CrossEntropyLoss()
    correct, loss = 0, 0.0
    with torch.no_grad():
        for images, labels in testloader:
            outputs = net(images.to(device))
            loss += criterion(outputs, labels.to(device)).item()
            correct += (outputs.argmax(1) == labels.to(device)).sum().item()
    return loss / len(testloader), correct / len(testloader.dataset)
