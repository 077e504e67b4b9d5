"""Section 3.3 of FixBN: statistics by equation 1 under fixed weights, then weights under fixed statistics."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch

from experiments.definitions.programs import decoupling
from experiments.definitions.programs.decoupling import BATCH, STREAM, accuracies, update_statistics
from fl_bn.copying import copied
from fl_bn.data.batches import draw_batches
from fl_bn.federation.local import Samples
from fl_bn.federation.rounds import Rounds
from fl_bn.federation.server import Server
from fl_bn.federation.settings import seeded
from fl_bn.run import assembly
from fl_bn.run.config import RunConfig

CONFIG = RunConfig.from_mapping(
    {"method": "fixbn", "freeze-after": 0, "calibrate": 0, "clients": 2, "rounds": 3, "local-steps": 1, "clip": "none", "evaluate-every": 2}
)


def test_statistics_are_the_mean_of_the_clients_and_weights_stay() -> None:
    """By hand, in the first layer. Control: the plain mean of the batches, without equation 1's old share, is another."""
    clients = [assembly.client_samples(CONFIG, client)[0] for client in range(2)]
    clients = [clients[0], Samples(clients[1].x[:60], clients[1].y[:60])]  # of unequal size
    server = Server(assembly.source_model(CONFIG), CONFIG.build_method(), Rounds(2), CONFIG.rounds)
    before, models = dict(server.shared.tensors()), [copied(server.model) for _ in clients]
    convolution = next(layer for layer in server.model.modules() if isinstance(layer, torch.nn.Conv2d))
    update_statistics(server, models, clients, CONFIG, 1)
    after, means = server.shared.tensors(), []
    for client, own in enumerate(clients):
        (index,) = draw_batches(len(own), CONFIG.batch_size, seeded(STREAM, CONFIG.seed, client, 1, BATCH), steps=1)
        means.append(convolution(own.rows(index, None)[0].float() / 127.5 - 1).mean((0, 2, 3)).detach())
    share = len(clients[0]) / (len(clients[0]) + 60)
    observed = share * means[0] + (1 - share) * means[1]
    name = next(name for name in after if name.endswith("running_mean"))
    assert torch.allclose(after[name].float(), 0.1 * observed, atol=1e-6)  # 0.9 of the old mean, which is 0
    assert not torch.allclose(after[name].float(), observed, atol=1e-3)
    changed = {name for name in after if not torch.equal(after[name], before[name])}
    assert changed == {name for name in after if "running_" in name}


def test_a_decoupled_round_normalises_with_the_statistics_of_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: plain BN updates its statistics in training, and takes no turn."""
    turns: list[int] = []
    original = update_statistics
    monkeypatch.setattr(decoupling, "update_statistics", lambda *args: (turns.append(args[-1]), original(*args)))
    assert [round for round, _ in accuracies(CONFIG)] == [2, 3]
    assert turns == [1, 2, 3]
    plain = RunConfig.from_mapping({**CONFIG.to_mapping(), "method": "fedavg", "freeze-after": -1, "calibrate": -2})
    assert [round for round, _ in accuracies(plain)] == [2, 3]
    assert turns == [1, 2, 3]


def test_the_study_writes_its_table_and_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoupling, "accuracies", lambda config: [(10, 0.2), (20, 0.25 if config.method == "fixbn" else 0.5)])
    rows = decoupling.run(tmp_path / "out")
    assert {(row.method, row.accuracy) for row in rows if row.round == 20} == {("BN", 50.0), ("decoupled", 25.0)}
    with (tmp_path / "out" / "decoupling.csv").open(newline="") as file:
        assert len(list(csv.DictReader(file))) == len(rows) == 8
    assert (tmp_path / "out" / "decoupling.png").stat().st_size > 10_000
