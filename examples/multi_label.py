"""FedBN with several labels per sample: four clients whose sensors are calibrated differently, and a network for each
client.
"""

from functools import partial

import torch
from sklearn.datasets import make_multilabel_classification
from torch import nn
from torch.optim import AdamW

from fl_bn import Federation, MultiLabel, SeededBatches, methods

ROUNDS = 12


def load_data():
    """Make random data: 20 features, 5 labels. Each client has the features on a scale of its own."""
    x, y = make_multilabel_classification(1200, n_features=20, n_classes=5, n_labels=2, random_state=0)
    x, y = torch.from_numpy(x).float() / 10, torch.from_numpy(y)
    return [(x[i::4] * (1 + i) + i, y[i::4]) for i in range(4)]


def main():
    torch.manual_seed(0)
    data = load_data()
    # SeededBatches makes runs repeat bit for bit. A DataLoader works as well
    clients = [SeededBatches(x[60:], y[60:], batch_size=32) for x, y in data]
    net = nn.Sequential(nn.Linear(20, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 5))
    federation = Federation(net, methods.fedbn(), clients, task=MultiLabel(), optimizer=partial(AdamW, lr=0.003), local_epochs=2)
    for record in federation.run(ROUNDS):
        print(f"round {record.round:>2} loss {record.loss:.3f}")
    for number, (x, y) in enumerate(data):  # each client's network on test data of its own
        logits = federation.client_model(number)(x[:60])
        state = MultiLabel().state()
        state.update(logits, y[:60])
        print(f"client {number} mean average precision {state['mean-average-precision']:.3f}, F1 {state['f1-micro']:.3f}")


if __name__ == "__main__":
    main()
