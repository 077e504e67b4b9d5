"""Regression: the progression of diabetes from ten measurements, at four clients of different age groups."""

from functools import partial

import torch
from sklearn.datasets import load_diabetes
from torch import nn
from torch.optim import Adam
from torch.utils.data import DataLoader, TensorDataset

from fl_bn import Federation, Regression, methods

ROUNDS = 15


def load_data():
    x, y = load_diabetes(return_X_y=True)
    x, y = torch.from_numpy(x).float() * 20, torch.from_numpy(y).float()
    y = (y - y.mean()) / y.std()  # in standard deviations, so that the loss is near 1 at the start
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    test, train = order[:100], order[100:]
    train = train[x[train, 0].argsort()]  # column 0 is the age
    loaders = [DataLoader(TensorDataset(x[own], y[own]), batch_size=16, shuffle=True, drop_last=True) for own in train.chunk(4)]
    return loaders, DataLoader(TensorDataset(x[test], y[test]), batch_size=100)


def main():
    torch.manual_seed(0)
    loaders, test = load_data()
    net = nn.Sequential(nn.Linear(10, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 1))
    federation = Federation(
        net,
        methods.fixbn(),
        loaders,
        task=Regression(),  # mean squared error; R2, MSE, MAE
        test=test,
        optimizer=partial(Adam, lr=0.003),
    )
    for record in federation.run(ROUNDS):
        print(f"round {record.round:>2} R2 {record.evaluation['r2']:.3f}  MAE {record.evaluation['mae']:.3f}")


if __name__ == "__main__":
    main()
