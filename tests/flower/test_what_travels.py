"""What leaves a client and what does not, read off every message of a run in both directions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import RecordDict
from safetensors.torch import load_file
from torch.nn import functional as F

from fl_bn.conversion import convert
from fl_bn.data.dataset import to_input
from fl_bn.federation.local import Samples
from fl_bn.federation.settings import LocalTraining
from fl_bn.flower.app.client_state import NOTHING, MemoryState
from fl_bn.methods import METHODS
from fl_bn.roles import Role, roles
from tests.in_process import Run, WatchedGrid, arrays_of, client_app, identical, run, sections
from tests.networks import seeded_network

Clients = Callable[..., list[Samples]]
DSGD = LocalTraining(batch_size=64, steps=1, momentum=0.9, update="gradients")


@pytest.fixture
def clients(tiny_clients: Clients) -> list[Samples]:
    return tiny_clients((6, 4, 5))


def travelling(ran: Run) -> Iterator[tuple[str, np.ndarray]]:
    """Name and array of every tensor in every message, instructions and replies."""
    for message in [*ran.grid.sent, *ran.grid.received]:
        if message.has_content():
            yield from ((name, array) for arrays in sections(message.content).values() for name, array in arrays.items())


def state(ran: Run, client: int, section: str) -> dict[str, np.ndarray]:
    kept: RecordDict = ran.grid.states()[client]
    return arrays_of(kept.array_records[f"fl-bn/{section}"])


@pytest.mark.parametrize("name", METHODS)
def test_tensors_that_stay_home_are_in_no_message(name: str, clients: list[Samples]) -> None:
    method = METHODS[name]()
    ran = run(method, clients, 2, policy={"calibrate": 1})
    names = {k for k, _ in travelling(ran)}
    role = roles(convert(seeded_network("cnn"), method))
    shared, kept = {k for k in role if method.shares(role[k])}, {k for k in role if not method.shares(role[k])}
    assert not names & kept
    assert {k for k in shared if role[k] is Role.WEIGHT} <= names  # control: the scan finds what does travel
    assert not any("num_batches_tracked" in k or "mixing_logit" in k for k in names)


def test_mixing_logits_are_trained_kept_and_never_sent_under_any_name(clients: list[Samples]) -> None:
    ran = run(METHODS["hbn"](), clients, 3)
    sent = {array.tobytes() for _, array in travelling(ran)}
    logits = [state(ran, client, "local") for client in range(3)]
    assert set(logits[0]) == {"1.mixing_logit", "5.mixing_logit"}
    assert all(np.abs(array).max() > 0 for kept in logits for array in kept.values())
    assert not identical(logits[0], logits[1])
    assert not any(array.tobytes() in sent for kept in logits for array in kept.values())
    assert ran.trajectory[2]["9.weight"].tobytes() in sent  # control


@pytest.mark.parametrize(
    ("name", "travels"), [("fedbn", []), ("silobn", ["bias", "weight"]), ("fedavg", ["bias", "running_mean", "running_var", "weight"])]
)
def test_which_tensors_of_batch_norm_travel(name: str, travels: list[str], clients: list[Samples]) -> None:
    ran = run(METHODS[name](), clients, 2)
    assert sorted({k.split(".")[1] for k, _ in travelling(ran) if k.split(".")[0] in ("1", "5")}) == travels


@pytest.mark.parametrize("name", ["fedbn", "silobn"])
def test_clients_with_models_of_their_own_evaluate_them_and_the_server_does_not(name: str, clients: list[Samples], tmp_path: Path) -> None:
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
    models = [load_file(tmp_path / "run" / "clients" / f"client-{client}.safetensors") for client in range(3)]
    for client, saved in enumerate(models):  # by hand: the saved model has the accuracy that was reported
        model = convert(seeded_network("cnn"), method)
        model.load_state_dict(saved)
        with torch.no_grad():
            predicted = model.eval()(to_input(clients[client].x, torch.float32)).argmax(1)
        assert float((predicted == clients[client].y).double().mean()) == pytest.approx(accuracy[client])
    assert torch.equal(models[0]["9.weight"], models[1]["9.weight"])
    assert not torch.equal(models[0]["1.running_mean"], models[1]["1.running_mean"])
    assert torch.equal(models[0]["1.weight"], models[1]["1.weight"]) == (name == "silobn")


@pytest.mark.parametrize("name", ["fedbn", "silobn"])
def test_a_client_evaluates_what_it_made_in_this_round_of_its_own_layers(name: str, clients: list[Samples], tmp_path: Path) -> None:
    ran = [
        run(METHODS[name](), clients, 3, grid=WatchedGrid(client_app(METHODS[name](), clients, folder=tmp_path), 3), save_clients="run"),
        run(METHODS[name](), clients, 2),
    ]
    for client in range(3):
        saved = load_file(tmp_path / "run" / "clients" / f"client-{client}.safetensors")
        now, before = (state(r, client, "local") for r in ran)
        assert identical({k: saved[k].numpy() for k in now}, now)
        assert not identical(now, before)  # control


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

    def after(rounds: int, when: str) -> Run:
        def disturb(client: int, what: str) -> None:
            if client == 1 and what == when:
                raise OSError("the disk is full")

        return run(method, clients, rounds, grid=WatchedGrid(client_app(method, clients, disturb=disturb), 3))

    assert identical(state(after(2, "train 2"), 1, "local"), state(after(1, ""), 1, "local"))
    assert not identical(state(after(2, ""), 1, "local"), state(after(1, ""), 1, "local"))  # control


def test_what_was_kept_for_another_method_is_not_used(clients: list[Samples]) -> None:
    kept = run(METHODS["hbn"](), clients, 1).grid.states()[0]
    signature = str(kept.config_records["fl-bn/kept-for"]["signature"])
    assert set(MemoryState(kept, signature).read(2).sections) == {"local"}
    assert MemoryState(kept, "another").read(2) == NOTHING
    assert MemoryState(RecordDict(), signature).read(2) == NOTHING
