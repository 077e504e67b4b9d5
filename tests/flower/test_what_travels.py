"""What leaves a client and what does not, read off every message of a run, and what a client keeps. See also tests/conformance."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from fl_bn import convert
from fl_bn.data.dataset import to_input
from fl_bn.methods import METHODS, Role
from tests.flower.inside import Samples
from tests.in_process import Run, WatchedGrid, arrays_of, client_app, identical, run, sections
from tests.networks import seeded_network

Clients = Callable[..., list[Samples]]


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
