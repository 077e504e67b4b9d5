"""Train a whole federation in plain torch: ten clients with one digit each, two methods, one table."""

from functools import partial

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset

from fl_bn import Federation, methods

ROUNDS = 12


def load_data():
    """Return a training loader for each digit, and one test loader."""
    x, y = load_digits(return_X_y=True)
    x, y = torch.from_numpy(x).float() / 16, torch.from_numpy(y)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    test, train = order[:360], order[360:]
    clients = [TensorDataset(x[own], y[own]) for digit in range(10) for own in [train[y[train] == digit]]]
    loaders = [DataLoader(client, batch_size=32, shuffle=True, drop_last=True) for client in clients]
    return loaders, DataLoader(TensorDataset(x[test], y[test]), batch_size=360)


def make_net():
    torch.manual_seed(0)  # every method starts from the same weights
    return nn.Sequential(
        nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(),
        nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(),
        nn.Linear(64, 10),
    )


def main():
    loaders, test = load_data()
    print(f"{'method':<8} {'accuracy':>8} {'loss':>8}")
    for method in (methods.fedavg(), methods.fbn()):
        optimizer = partial(SGD, lr=0.05, momentum=0.9)  # called anew for every client and round
        federation = Federation(make_net(), method, loaders, test=test, optimizer=optimizer, evaluate_every=ROUNDS)
        *_, last = federation.run(ROUNDS)  # a generator: the rounds run as you ask for their records
        print(f"{method.name:<8} {last.evaluation['accuracy']:>8.3f} {last.evaluation['loss']:>8.3f}")
    # federation.model is the trained network, federation.history every round's record, federation.save(path) writes safetensors


if __name__ == "__main__":
    main()
