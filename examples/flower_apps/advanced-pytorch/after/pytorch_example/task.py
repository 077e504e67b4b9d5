"""The network, synthetic data in the shape of Fashion-MNIST, the training and test loops, and a run's folder."""

import json
from datetime import datetime
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 5)
        self.bn1 = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 16, 5)
        self.bn2 = nn.BatchNorm2d(16)
        self.fc1 = nn.Linear(16 * 4 * 4, 32)
        self.fc2 = nn.Linear(32, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(x))), 2)
        x = F.max_pool2d(F.relu(self.bn2(self.conv2(x))), 2)
        return self.fc2(F.relu(self.fc1(x.flatten(1))))


def made(samples, seed, labels):
    """Make noisy grey pictures, with one pattern for each class."""
    patterns = torch.randn(10, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    y = labels[torch.randint(len(labels), (samples,), generator=generator)]
    return TensorDataset(patterns[y] + torch.randn(samples, 1, 28, 28, generator=generator), y)


def load_data(partition_id, num_partitions):
    """Load the data of one client, which lacks some of the classes."""
    labels = torch.tensor([label for label in range(10) if label % num_partitions != partition_id])
    generator = torch.Generator().manual_seed(partition_id)
    trainloader = DataLoader(made(64, 1 + partition_id, labels), batch_size=16, shuffle=True, generator=generator)
    return trainloader, DataLoader(made(32, 1001 + partition_id, labels), batch_size=32)


def load_test():
    return DataLoader(made(100, 2001, torch.arange(10)), batch_size=100)


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
    net.to(device)
    net.eval()
    criterion = nn.CrossEntropyLoss()
    correct, loss = 0, 0.0
    with torch.no_grad():
        for images, labels in testloader:
            outputs = net(images.to(device))
            loss += criterion(outputs, labels.to(device)).item()
            correct += (outputs.argmax(1) == labels.to(device)).sum().item()
    return loss / len(testloader), correct / len(testloader.dataset)


def create_run_dir(config):
    """Make a folder for the results of this run, with its config."""
    run_dir = datetime.now().strftime("%Y-%m-%d/%H-%M-%S")
    save_path = Path.cwd() / "outputs" / run_dir
    save_path.mkdir(parents=True)
    (save_path / "run_config.json").write_text(json.dumps(dict(config)))
    return save_path, run_dir
