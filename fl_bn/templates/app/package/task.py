"""Define the network, the data and the training loop: change them as you like."""

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

TEST_SAMPLES = 360  # of 1,797


class Net(nn.Module):
    """Classify grey images of 8 x 8 pixels by a small CNN with BatchNorm."""

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.head = nn.Linear(32 * 2 * 2, 10)

    def forward(self, x):
        """Return the scores (B, 10) of images (B, 1, 8, 8)."""
        return self.head(self.features(x).flatten(1))


def load_data(client: int, clients: int, batch_size: int, path: str = ""):
    """Load one client's training and test batches: a site's own arrays, or few of the ten digits and a test with all of them.

    ``path`` is an npz file with x_train, y_train, x_test and y_test: data-path in
    the site's site.toml.
    """
    if path:
        own = np.load(path)
        parts = [(own[f"x_{part}"], own[f"y_{part}"]) for part in ("train", "test")]
    else:
        x, y = load_digits(return_X_y=True)
        shuffled = np.random.default_rng(0).permutation(len(y))
        train, test = shuffled[TEST_SAMPLES:], shuffled[:TEST_SAMPLES]
        by_digit = train[np.argsort(y[train], kind="stable")]
        own = np.array_split(by_digit, clients)[client]
        parts = [(x[own], y[own]), (x[test], y[test])]
    training, testing = (TensorDataset(torch.from_numpy(x).float().view(-1, 1, 8, 8) / 16, torch.from_numpy(y)) for x, y in parts)
    batches = DataLoader(training, batch_size, shuffle=True, drop_last=len(training) > batch_size)
    return batches, DataLoader(testing, batch_size=128)


def train(net, batches, epochs, lr):
    """Train the network; return the mean loss of the steps."""
    optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)
    net.train()
    losses = []
    for _ in range(epochs):
        for images, labels in batches:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(net(images), labels)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return sum(losses) / len(losses)


@torch.no_grad()
def test(net, batches):
    """Return the mean loss and the accuracy."""
    net.eval()
    loss, right, samples = 0.0, 0, 0
    for images, labels in batches:
        scores = net(images)
        loss += nn.functional.cross_entropy(scores, labels, reduction="sum").item()
        right += (scores.argmax(1) == labels).sum().item()
        samples += len(labels)
    return loss / samples, right / samples
