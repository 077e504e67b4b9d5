"""Train with fl-bn in your own training loop, with mixed precision, AdamW, a cosine scheduler, gradient accumulation
and a two-output network.

fl-bn needs only the lines marked "fl-bn". You decide how instructions and replies travel (in this file: a for loop).
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from fl_bn import convert, local_round, methods, server_round, server_state

ROUNDS, ACCUMULATE = 10, 2
METHOD = methods.fixbn()
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Net(nn.Module):
    """Return logits and features, as many networks do."""

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU())
        self.head = nn.Linear(32, 10)

    def forward(self, x):
        features = self.features(x)
        return self.head(features), features


def load_data():
    """Return the training data of five clients, with two digits each, and the test data."""
    x, y = load_digits(return_X_y=True)
    x, y = torch.from_numpy(x).float() / 16, torch.from_numpy(y)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    test, train = order[:360], order[360:]
    clients = [TensorDataset(x[own], y[own]) for i in range(5) for own in [train[y[train] // 2 == i]]]
    return clients, (x[test], y[test])


def train(model, loader):
    """Train for one epoch, as you would without a federation."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=len(loader) // ACCUMULATE)
    scaler = torch.amp.GradScaler(DEVICE, enabled=DEVICE == "cuda")  # bfloat16 on the CPU needs no scaler
    dtype, total = torch.float16 if DEVICE == "cuda" else torch.bfloat16, 0.0
    for number, (x, y) in enumerate(loader, 1):
        with torch.autocast(DEVICE, dtype):
            logits, features = model(x.to(DEVICE))
            loss = F.cross_entropy(logits, y.to(DEVICE)) + 1e-4 * features.square().mean()
        scaler.scale(loss / ACCUMULATE).backward()
        total += loss.item()
        if number % ACCUMULATE == 0:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scheduler.step()
    return total / len(loader)


def test(model, x, y):
    with torch.no_grad():
        logits, _ = model.to(DEVICE).eval()(x.to(DEVICE))
    return (logits.argmax(1) == y.to(DEVICE)).float().mean().item()


def main():
    torch.manual_seed(0)
    net, (clients, test_data) = Net(), load_data()
    state = server_state(net, METHOD, ROUNDS, clients=len(clients))  # fl-bn: the server
    kept = {}  # fl-bn: what each client keeps between its rounds (FedBN's layers, say); it never leaves it
    for _ in range(ROUNDS):
        instruction, replies = state.instruction(), []  # fl-bn: what the server sends
        for number, data in enumerate(clients):
            loader = DataLoader(data, batch_size=16, shuffle=True, drop_last=True)
            model = convert(net, METHOD).to(DEVICE)  # fl-bn: this client's copy
            before = [kept[number]] if number in kept else []
            with local_round(model, METHOD, instruction, *before) as round:  # fl-bn
                # HBN measures before it trains: round.measure(loader)
                loss = train(model, loader)
            reply, kept[number] = round.reply(len(data), loss, client=number)  # fl-bn: what the client sends
            replies.append(reply)
        state, record = server_round(state, replies)  # fl-bn
        print(f"round {record.round:>2} {record.phase:<7} loss {record.loss:.3f}  accuracy {test(state.model, *test_data):.3f}")


if __name__ == "__main__":
    main()
