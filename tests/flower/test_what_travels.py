"""What leaves a client and what does not, read off every message of a run, and what a client keeps. See also tests/conformance."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Message
from safetensors.torch import load_file
from torch.nn import functional as F

from fl_bn import convert
from fl_bn.data.dataset import to_input
from fl_bn.federation.auxiliary import auxiliary
from fl_bn.methods import METHODS, Role
from fl_bn.objectives import Scaffold
from tests.federation import random_samples
from tests.flower.inside import LocalTraining, Samples
from tests.in_process import Run, WatchedGrid, arrays_of, client_app, identical, run, sections
from tests.networks import seeded_network

Clients = Callable[..., list[Samples]]
DSGD = LocalTraining(batch_size=64, steps=1, momentum=0.9, update="gradients")


@pytest.fixture
def clients(tiny_clients: Clients) -> list[Samples]:
    return tiny_clients((6, 4, 5))


def travelling(ran: Run) -> Iterator[np.ndarray]:
    """Every tensor in every message, instructions and replies."""
    for message in [*ran.grid.sent, *ran.grid.received]:
        if message.has_content():
            yield from (array for arrays in sections(message.content).values() for array in arrays.values())


def state(ran: Run, client: int, section: str) -> dict[str, np.ndarray]:
    return arrays_of(ran.grid.states()[client].array_records[f"fl-bn/{section}"])


def test_mixing_logits_are_trained_kept_and_never_sent_under_any_name(clients: list[Samples]) -> None:
    ran = run(METHODS["hbn"](), clients, 3)
    sent = {array.tobytes() for array in travelling(ran)}
    logits = [state(ran, client, "local") for client in range(3)]
    assert set(logits[0]) == {"1.mixing_logit", "5.mixing_logit"}
    assert all(np.abs(array).max() > 0 for kept in logits for array in kept.values())
    assert not identical(logits[0], logits[1])
    assert not any(array.tobytes() in sent for kept in logits for array in kept.values())
    assert ran.trajectory[2]["9.weight"].tobytes() in sent  # control


@pytest.mark.parametrize("name", [name for name in METHODS if METHODS[name]().personal and METHODS[name]().shares(Role.WEIGHT)])
def test_clients_with_models_of_their_own_evaluate_and_save_what_they_made_and_the_server_does_not(
    name: str, clients: list[Samples], tmp_path: Path
) -> None:
    def never(model: torch.nn.Module) -> dict[str, float]:
        raise AssertionError("the server has no such model")

    method = METHODS[name]()
    grid = WatchedGrid(client_app(method, clients, folder=tmp_path), 3)
    ran = run(method, clients, 3, grid=grid, evaluate=never, save_clients="run", policy={"evaluate_every": 2, "fraction": 0.7})
    assert [bool(record.evaluation) for record in ran.records] == [False, True, True]
    assert grid.kinds().count("evaluate 2") == 1
    last = ran.records[-1]
    accuracy = np.array([last.client_evaluation[client]["accuracy"] for client in range(3)])
    assert last.evaluation["accuracy"] == pytest.approx(accuracy.mean())
    assert last.evaluation["accuracy-std"] == pytest.approx(accuracy.std())
    assert last.evaluation["accuracy-min"] == accuracy.min()
    for client in range(3):  # by hand: the saved model has the accuracy that was reported, and the layers that the client keeps
        model, saved = convert(seeded_network("cnn"), method), load_file(tmp_path / "run" / "clients" / f"client-{client}.safetensors")
        model.load_state_dict(saved)
        with torch.no_grad():
            predicted = model.eval()(to_input(clients[client].x, torch.float32)).argmax(1)
        assert float((predicted == clients[client].y).double().mean()) == pytest.approx(accuracy[client])
        kept = state(ran, client, "local")
        assert identical({k: saved[k].numpy() for k in kept}, kept)


def gradients(ran: Run, round: int) -> list[dict[str, np.ndarray]]:
    return [reply["gradients"] for reply in ran.grid.train(round, replies=True)]


def by_hand(ran: Run, samples: Samples, round: int) -> dict[str, np.ndarray]:
    """The gradient of one client's samples at the weights it was sent, with the shared statistics as constants."""
    model = seeded_network("plain")
    (sent, *_) = ran.grid.train(round)
    model.load_state_dict({k: torch.from_numpy(a.copy()) for section in sent.values() for k, a in section.items()}, strict=False)
    F.cross_entropy(model.eval()(to_input(samples.x, torch.float32)), samples.y).backward()
    return {k: p.grad.numpy() for k, p in model.named_parameters() if p.grad is not None}


def test_gradients_travel_through_the_whole_stack(clients: list[Samples]) -> None:
    plain, policy = replace(METHODS["fbn"](), centre=False), {"rate": lambda round, rounds: 0.5}
    ran = run(plain, clients, 2, settings=DSGD, model=seeded_network("plain"), policy=policy)
    before, counts = ran.grid.train(1)[0]["weights"], np.array([6, 4, 5])
    mine = [by_hand(ran, samples, 1) for samples in clients]
    for k in before:
        expected = before[k] - 0.5 * sum(n * (1 - 0.9) * g[k].astype("float64") for n, g in zip(counts, mine, strict=True)) / counts.sum()
        assert np.allclose(ran.trajectory[1][k], expected, rtol=1e-5, atol=1e-7), k
    wrong = before["9.bias"] - 0.5 * sum(0.1 * g["9.bias"] for g in mine) / 3
    assert not np.allclose(ran.trajectory[1]["9.bias"], wrong, rtol=1e-5, atol=1e-7)  # control: clients counted alike

    for client, samples in enumerate(clients):  # momentum survives: m2 = 0.9 m1 + 0.1 g2
        first, second, gradient = gradients(ran, 1)[client], gradients(ran, 2)[client], by_hand(ran, samples, 2)
        assert all(np.allclose(second[k], 0.9 * first[k] + 0.1 * gradient[k], rtol=1e-4, atol=1e-7) for k in second)
        assert not all(np.allclose(second[k], 0.1 * gradient[k], rtol=1e-4, atol=1e-7) for k in second)  # control: without it
        assert identical(state(ran, client, "momentum"), second)


def test_a_client_that_failed_keeps_what_it_had(clients: list[Samples]) -> None:
    method = METHODS["hbn"]()

    def after(rounds: int, when: str) -> dict[str, np.ndarray]:
        def disturb(client: int, what: str) -> None:
            if client == 1 and what == when:
                raise OSError("the disk is full")

        return state(run(method, clients, rounds, grid=WatchedGrid(client_app(method, clients, disturb=disturb), 3)), 1, "local")

    assert identical(after(2, "train 2"), after(1, ""))
    assert not identical(after(2, ""), after(1, ""))  # control


# SCAFFOLD's control variates: the server's is the mean of the clients', also after replies were lost

SETTINGS = LocalTraining(64, steps=2, objective=Scaffold(2))
FEDAVG = METHODS["fedavg"]()


class LosingGrid(WatchedGrid):
    """Loses the replies of (client, round), and what round each client is told of as counted."""

    lost: frozenset[tuple[int, int]] = frozenset()
    deaf = False

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        came = list(super().pull_messages(message_ids))
        return [
            m for m in came if (m.metadata.src_node_id - 1, int(m.metadata.group_id)) not in self.lost or m.metadata.message_type != "train"
        ]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        messages = list(messages)
        for message in messages if self.deaf else []:
            if message.metadata.message_type == "train":
                del message.content.config_records["fl-bn/config"]["counted"]
        return super().push_messages(messages)


def offset(lost: set[tuple[int, int]], rounds: int = 5, deaf: bool = False, **policy: Any) -> float:
    """Largest difference between the server's control variate and the mean of the clients', after ``rounds``."""
    clients = [random_samples(n, brightness=i / 2, seed=i) for i, n in enumerate((6, 14, 10))]
    network = seeded_network("cnn", dtype=torch.float64)
    grid = LosingGrid(client_app(FEDAVG, clients, SETTINGS, model=network), 3)
    grid.lost, grid.deaf = frozenset(lost), deaf
    ran = run(FEDAVG, clients, rounds, settings=SETTINGS, model=network, grid=grid, policy={"auxiliary": auxiliary(SETTINGS), **policy})
    server = ran.strategy.transport.shared.auxiliary["control"]
    own = [{k: a.numpy() for k, a in state.array_records["fl-bn/objective"].items()} for state in grid.states()]
    assert max(float(c.abs().max()) for c in server.values()) > 1e-3
    return max(float(np.abs(c.numpy() - sum(kept[name] for kept in own) / 3).max()) for name, c in server.items())


@pytest.mark.parametrize(
    ("lost", "policy"),
    [
        (set(), {}),
        ({(0, 1)}, {}),
        ({(1, 2), (1, 3), (0, 3)}, {}),
        ({(0, 2), (1, 2)}, {"min_replies": 1.0, "max_failed": 3}),
    ],
)
def test_the_servers_variate_is_the_mean_of_the_clients(lost: set[tuple[int, int]], policy: dict[str, Any]) -> None:
    """The control: clients that are not told what was counted drift off for good."""
    assert offset(lost, **policy) < 1e-15
    assert not lost or (1, 2) not in lost or offset(lost, deaf=True, **policy) > 1e-3
