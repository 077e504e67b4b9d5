"""Measure the accuracy when clients lie about their running variances, with and without a robust rule.

After k honest steps, a running variance is at least (1 - momentum)^k of its earlier value. The server does not refuse
smaller ones. Liars report 0 in the column "0", and exactly that bound in the column "least". The difference shows
whether refusing smaller values would help. Setting: digits, a CNN with two BatchNorm layers, ten clients; the liars
lie from round 2 on.

    python benchmarks/low_variances.py --quick
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

from fl_bn import convert, local_round, server_round, server_state
from fl_bn.federation.defence import NO_DEFENCE, Defence
from fl_bn.federation.values import Instruction, Reply
from fl_bn.methods import METHODS, Method

CLIENTS, BATCH, TEST, MOMENTUM = 10, 16, 360, 0.1
Lie = Callable[[Tensor, Tensor, int], Tensor]  # (the layer's true variance, the one that the server sent, steps) -> the claim
LIES: dict[str, Lie] = {
    "honest": lambda own, sent, steps: own,
    "0": lambda own, sent, steps: torch.zeros_like(own),
    "least": lambda own, sent, steps: sent * (1 - MOMENTUM) ** steps,
    "x 10": lambda own, sent, steps: 10 * own,
}


@cache
def data() -> tuple[Tensor, Tensor]:
    """Load scikit-learn's digits: images of shape (N, 1, 8, 8) with values in 0..1, and labels of shape (N,)."""
    x, y = load_digits(return_X_y=True)
    return torch.from_numpy(x).float().view(-1, 1, 8, 8) / 16, torch.from_numpy(y)


def network(seed: int) -> nn.Module:
    """Build the network, with initial weights that depend only on ``seed``."""
    torch.manual_seed(seed)
    first = [nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)]
    second = [nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*first, *second, nn.Flatten(), nn.Linear(128, 10))


def trained(
    model: nn.Module, method: Method, asked: Instruction, own: np.ndarray, steps: int, client: int, rng: np.random.Generator
) -> Reply:
    """Train one client honestly for ``steps`` local steps; return its reply.

    Args:
        model: The network before conversion.
        method: The method.
        asked: The server's instruction.
        own: The indices of the client's training samples.
        steps: The number of local steps.
        client: The index of the client.
        rng: The generator of the batches.
    """
    mine, (x, y) = convert(model, method), data()
    with local_round(mine, method, asked) as round:
        optimizer = torch.optim.SGD(mine.parameters(), lr=asked.learning_rate / 2, momentum=0.9)
        for _ in range(steps):
            batch = torch.from_numpy(rng.choice(own, BATCH, replace=False))
            optimizer.zero_grad()
            F.cross_entropy(mine(x[batch]), y[batch]).backward()
            optimizer.step()
    return round.reply(len(own), client=client)[0]


def lying(reply: Reply, asked: Instruction, lie: Lie, steps: int) -> Reply:
    """Return the reply with its running variances replaced by ``lie``."""
    own, sent = reply.sections.get("statistics", {}), asked.sections.get("statistics", {})
    claimed = {name: lie(tensor, sent[name], steps) if name.endswith("var") else tensor for name, tensor in own.items()}
    return replace(reply, sections={**reply.sections, "statistics": claimed}) if claimed else reply


def accuracy(method: Method, lie: str, liars: int, defence: Defence, steps: int, skewed: bool, seed: int, rounds: int) -> float:
    """Train ten clients for ``rounds`` rounds; return the test accuracy (0..1) of the shared model.

    Args:
        method: The method.
        lie: The lie of the liars, a key of ``LIES``.
        liars: The number of liars.
        defence: The robust rule of the server.
        steps: The local steps per round.
        skewed: Whether each client has only a few of the ten digits.
        seed: The seed.
        rounds: The number of rounds.
    """
    rng, (x, y) = np.random.default_rng(seed), data()
    test, train = np.split(rng.permutation(len(y)), [TEST])
    train = train[np.argsort(y[train].numpy(), kind="stable")] if skewed else train
    parts, model = np.array_split(train, CLIENTS), network(seed)
    state = server_state(model, method, rounds, clients=CLIENTS, defence=defence)
    for number in range(1, rounds + 1):
        asked = state.instruction()
        replies = [trained(model, method, asked, own, steps, client, rng) for client, own in enumerate(parts)]
        if number > 1:
            replies[-liars:] = [lying(reply, asked, LIES[lie], steps) for reply in replies[-liars:]]
        state, record = server_round(state, replies)
        assert record.aggregated
    shared = state.model.eval()
    with torch.no_grad():
        return float((shared(x[test]).argmax(1) == y[test]).double().mean())


def main(argv: Sequence[str] | None = None) -> None:
    """Measure the accuracy under every lie, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one seed and one number of steps: some minutes on a core")
    quick = parser.parse_args(argv).quick
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    steps_tried, seeds = ((8,), range(1)) if quick else ((2, 8, 27), range(3))
    print("| method | digits | liars | rule for statistics | steps | " + " | ".join(LIES) + " |\n" + "|---" * (5 + len(LIES)) + "|")
    for name, method in (("fedavg", METHODS["fedavg"]()), ("fixbn", METHODS["fixbn"]())):
        for skewed in (False, True):
            for liars in (1, 3):
                for rule in ("mean", "median", "nnm+median"):
                    defence = NO_DEFENCE if rule == "mean" else Defence(liars, rule)
                    for steps in steps_tried:
                        cells = [name, "few each" if skewed else "all", liars, rule, steps]
                        for lie in LIES:
                            found = [accuracy(method, lie, liars, defence, steps, skewed, seed, 10) for seed in seeds]
                            cells.append(f"{100 * np.mean(found):.1f}")
                        print("| " + " | ".join(map(str, cells)) + " |", flush=True)


if __name__ == "__main__":
    main()
