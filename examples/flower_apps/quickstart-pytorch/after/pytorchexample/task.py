"""The network, synthetic data in the shape of CIFAR-10, and the training and test loops."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 5)
        self.bn1 = nn.BatchNorm2d(6)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.bn2 = nn.BatchNorm2d(16)
        self.fc1 = nn.Linear(16 * 5 * 5, 32)
        self.fc2 = nn.Linear(32, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(x))), 2)
        x = F.max_pool2d(F.relu(self.bn2(self.conv2(x))), 2)
        return self.fc2(F.relu(self.fc1(x.flatten(1))))


def made(samples: int, seed: int, labels: torch.Tensor, brightness: float = 0.0) -> TensorDataset:
    """Make noisy pictures, with one pattern for each class."""
    patterns = torch.randn(10, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    y = labels[torch.randint(len(labels), (samples,), generator=generator)]
    return TensorDataset(patterns[y] + torch.randn(samples, 3, 32, 32, generator=generator) + brightness, y)


def load_data(partition_id: int, num_partitions: int, batch_size: int):
    """Load the data of one client: half of the classes, in a brightness of its own."""
    labels, brightness = torch.arange(partition_id, partition_id + 5) % 10, 0.3 * partition_id
    trainloader = DataLoader(
        made(64, 1 + partition_id, labels, brightness), batch_size, shuffle=True, generator=torch.Generator().manual_seed(partition_id)
    )
    return trainloader, DataLoader(made(32, 1001 + partition_id, labels, brightness), batch_size)


def load_centralized_dataset():
    return DataLoader(made(64, 2001, torch.arange(10), 0.3), 64)


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
