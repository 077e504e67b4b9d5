"""The papers' studies without a run config (``experiments/definitions/programs``): each beside a calculation by hand, and its files."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from experiments.definitions.programs import decoupling, fedbn_synthetic, fedbn_toy
from experiments.definitions.programs.fedbn_synthetic import SMALL, Setting
from experiments.definitions.programs.normalisation_error import FBN, FIXBN, NAIVE, draws, normalised
from fl_bn.bn.modules import copied
from fl_bn.data.batches import draw_batches
from fl_bn.federation.policy import ServerPolicy
from fl_bn.federation.server import Server
from tests.experiment.inside import Samples, client_samples, config, seeded, source_model
from tests.oracles.fbn import Rule, algorithm_2, merged

# Figures 1 and 2 of the FBN paper

EPS, BETA = 1e-5, 0.1


def by_hand(rounds: list[Tensor], rule: Rule = algorithm_2) -> dict[str, float]:
    """Return the mean distance to centralised BatchNorm over points and rounds; ``rule`` moves FBN's statistics."""
    fbn, averaged = (np.zeros(2), np.ones(2)), (np.zeros(2), np.ones(2))
    found = {NAIVE: list[float](), FIXBN: list[float](), FBN: list[float]()}
    for t, points in enumerate(rounds, 1):
        u = points.numpy()
        K = u.shape[1]
        flat = u.reshape(-1, 2)
        central = (u - flat.mean(0)) / np.sqrt(flat.var(0) + EPS)
        mean_i, var_i = u.mean(1), u.var(1)
        naive = (u - mean_i[:, None]) / np.sqrt(var_i[:, None] + EPS)
        frozen = t > len(rounds) // 2
        methods = {
            NAIVE: naive,
            FIXBN: (u - averaged[0]) / np.sqrt(averaged[1] + EPS) if frozen else naive,
            FBN: (u - fbn[0]) / np.sqrt(fbn[1] + EPS),
        }
        for method, own in methods.items():
            found[method].append(float(np.sqrt(((own - central) ** 2).sum(-1)).mean()))
        if not frozen:
            averaged = (
                ((1 - BETA) * averaged[0] + BETA * mean_i).mean(0),
                ((1 - BETA) * averaged[1] + BETA * K / (K - 1) * var_i).mean(0),
            )
        fbn = rule(*fbn, list(u), BETA)
    return {method: float(np.mean(values)) for method, values in found.items()}


@pytest.mark.parametrize("similarity", [0.0, 0.3])
def test_the_normalisation_error_is_the_papers(similarity: float) -> None:
    rounds = draws(similarity, seeded(3), rounds=12)
    assert rounds[0].shape == (10, 30, 2)
    assert normalised(rounds).error == pytest.approx(by_hand(rounds), rel=1e-9)
    wrong = by_hand(rounds, partial(merged, spread=0.0))[FBN]  # control: without the last term of line 10
    assert wrong != pytest.approx(normalised(rounds).error[FBN], rel=1e-2)


# Section 3.3 of FixBN: statistics by equation 1 under fixed weights, then weights under fixed statistics

DECOUPLED = config(method="fixbn", freeze_after=0, calibrate=0, clients=2, rounds=3, local_steps=1, clip="none", evaluate_every=2)


def test_decoupled_statistics_are_the_mean_of_the_clients_and_weights_stay() -> None:
    """By hand, in the first layer. Control: the plain mean of the batches, without equation 1's old share, is another."""
    clients = [client_samples(DECOUPLED, client)[0] for client in range(2)]
    clients = [clients[0], Samples(clients[1].x[:60], clients[1].y[:60])]  # of unequal size
    server = Server(source_model(DECOUPLED), DECOUPLED.build_method(), ServerPolicy(2), DECOUPLED.rounds)
    before, models = dict(server.shared.tensors()), [copied(server.model) for _ in clients]
    convolution = next(layer for layer in server.model.modules() if isinstance(layer, torch.nn.Conv2d))
    decoupling.update_statistics(server, models, clients, DECOUPLED, 1)
    after, means = server.shared.tensors(), []
    for client, own in enumerate(clients):
        stream = seeded(decoupling.STREAM, DECOUPLED.seed, client, 1, decoupling.BATCH)
        (index,) = draw_batches(len(own), DECOUPLED.batch_size, stream, steps=1)
        means.append(convolution(own.rows(index, None)[0].float() / 127.5 - 1).mean((0, 2, 3)).detach())
    share = len(clients[0]) / (len(clients[0]) + 60)
    observed = share * means[0] + (1 - share) * means[1]
    name = next(name for name in after if name.endswith("running_mean"))
    assert torch.allclose(after[name].float(), 0.1 * observed, atol=1e-6)  # 0.9 of the old mean, which is 0
    assert not torch.allclose(after[name].float(), observed, atol=1e-3)
    changed = {name for name in after if not torch.equal(after[name], before[name])}
    assert changed == {name for name in after if "running_" in name}


# FedBN: the toy problem, the synthetic data, new clients, and a domain that nobody saw


def test_batchnorm_makes_the_clients_weights_one_that_can_be_averaged(tmp_path: Path) -> None:
    found = fedbn_toy.harmonised(tmp_path)
    one, other, error = found["with BN"]
    assert (one, other) == (pytest.approx(fedbn_toy.TRUE, rel=0.1),) * 2
    assert error < 0.05
    one, other, error = found["without BN"]  # control
    assert one > 2 * other
    assert error > 0.3


def after(method: str, shift: float, setting: Setting) -> float:
    clients = [setting.make(setting.samples, shift * client, seeded(0, client)) for client in range(2)]
    return fedbn_synthetic.losses(method, clients, setting, seed=0)[-1]


def test_fedbn_gains_by_feature_shift_alone() -> None:
    setting = replace(SMALL, steps=50)
    assert after("fedbn", 1.0, setting) < 0.7 * after("fedavg", 1.0, setting)
    assert after("fedbn", 0.0, setting) == pytest.approx(after("fedavg", 0.0, setting), rel=0.1)  # control
