"""Weights in half the bytes: a run's results to the rounding, its bytes, and what a side that lies may send."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Message
from torch import nn

from fl_bn.federation.defence import NO_DEFENCE, Defence
from fl_bn.federation.optimizers import fedavgm
from fl_bn.flower import FixBN, OwnAppStrategy, RunFailed
from fl_bn.flower.wire.codec import to_record
from fl_bn.methods import METHODS
from tests.flower.byzantine import equal_clients
from tests.flower.own_apps import data, epoch, net, own_app, refused
from tests.in_process import TWO_STEPS, LocalTraining, Run, WatchedGrid, client_app, run
from tests.listed import listed
from tests.networks import seeded_network
from tests.noted import noted

CLIENTS = 3
DSGD = LocalTraining(batch_size=64, steps=1, momentum=0.9, update="gradients")
NARROW = {"bfloat16": ("uint16", 2.0**-8), "float16": ("float16", 2.0**-11)}


def ran(payload: str, method: str = "fedavg", rounds: int = 1, settings: LocalTraining = TWO_STEPS, **options: Any) -> Run:
    return run(METHODS[method](), equal_clients(CLIENTS), rounds, settings=settings, policy={"payload": payload}, **options)


def read(array: np.ndarray) -> np.ndarray:
    """By NumPy alone, what the server should read."""
    if array.dtype == np.uint16:
        return (array.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return array.astype(np.float64)


def learnt(name: str) -> bool:
    return name.rpartition(".")[2] in ("weight", "bias")


@listed("payload", NARROW)
def test_the_new_weights_are_the_average_of_the_rounded_ones_that_came(payload: str) -> None:
    done = ran(payload)
    (down, *others), up = done.grid.train(1), done.grid.train(1, replies=True)
    wire, unit = NARROW[payload]
    for name, array in done.trajectory[1].items():
        section = "weights" if name in down["weights"] else "statistics"
        dtypes = {str(message[section][name].dtype) for message in [down, *others, *up]}
        assert dtypes == ({wire} if learnt(name) else {str(array.dtype)}), name
        average = np.mean([read(message[section][name]) for message in up], axis=0)
        assert np.allclose(array, average, rtol=1e-6, atol=1e-7)
    start = {name: p.detach().numpy() for name, p in seeded_network("cnn").named_parameters()}
    assert all((np.abs(read(down["weights"][name]) - w) <= np.maximum(unit * np.abs(w), 2.0**-25)).all() for name, w in start.items())
    assert any((read(down["weights"][name]) != w).any() for name, w in start.items())  # control: it was rounded


@listed(("method", "settings", "up"), [("fedavg", TWO_STEPS, "weights"), ("fbn", DSGD, "gradients")])
def test_bytes_are_halved_and_counted_so(method: str, settings: LocalTraining, up: str) -> None:
    (exact,), (half,) = (ran(payload, method, settings=settings).records for payload in ("float32", "bfloat16"))
    assert half.bytes_up[up] * 2 == exact.bytes_up[up]
    assert half.bytes_down["weights"] * 2 == exact.bytes_down["weights"]
    rest = [section for section in exact.bytes_up if section != up]
    assert rest
    assert all(half.bytes_up[section] == exact.bytes_up[section] for section in rest)  # statistics or moments
    assert [client.bytes_up for client in half.clients] == [sum(half.bytes_up.values())] * CLIENTS
    assert {d.nbytes for d in half.disclosures if d.section == up} == {half.bytes_up[up]}  # as it was received


def tensor(values: Any) -> Any:
    def put(answer: Message) -> None:
        weights = {name: array.numpy() for name, array in answer.content.array_records["fl-bn/weights"].items()}
        answer.content["fl-bn/weights"] = to_record(weights | {"9.bias": values(weights["9.bias"])})

    return put


def other_header(answer: Message) -> None:
    answer.content.config_records["fl-bn/header"]["payload"] = "float32"


LIES: dict[str, tuple[Any, str]] = {
    "another type": (tensor(lambda a: np.zeros(a.shape, np.float32)), "weights/9.bias"),
    "float16 patterns": (tensor(lambda a: np.zeros(a.shape, np.float16)), "weights/9.bias"),
    "signed patterns": (tensor(lambda a: a.view(np.int16)), "weights/9.bias"),
    "NaN patterns": (tensor(lambda a: np.full(a.shape, 0x7FC1, np.uint16)), "weights/9.bias"),
    "Inf patterns": (tensor(lambda a: np.full(a.shape, 0xFF80, np.uint16)), "weights/9.bias"),
    "another shape": (tensor(lambda a: a[:2]), "weights/9.bias"),
    "another header": (other_header, "header/payload"),
    "control": (tensor(lambda a: a.copy()), ""),
}


@listed("case", LIES)
def test_a_reply_in_another_form_is_refused_by_name(case: str) -> None:
    lie, field = LIES[case]

    class Liar(WatchedGrid):
        def _answer(self, message: Message) -> Message:
            answer = super()._answer(message)
            if message.metadata.message_type == "train" and message.metadata.dst_node_id == CLIENTS:
                lie(answer)
            return answer

    (record,) = ran("bfloat16", grid=Liar(client_app(METHODS["fedavg"](), equal_clients(CLIENTS)), CLIENTS)).records
    assert {c.client: c.refused.split(":")[0] for c in record.clients if c.refused} == ({CLIENTS - 1: field} if field else {})
    assert record.aggregated


def huge(scale: float) -> nn.Module:
    model = seeded_network("cnn")
    with torch.no_grad():
        model[9].bias.fill_(scale)
    return model


def test_the_server_sends_no_weight_beyond_the_range() -> None:
    grid = WatchedGrid(client_app(METHODS["fedavg"](), equal_clients(CLIENTS), model=huge(7e4)), CLIENTS)
    refused(lambda: ran("float16", grid=grid, model=huge(7e4)), RunFailed, "weights/9.bias")
    assert not grid.train(1)
    assert ran("bfloat16", grid=grid, model=huge(7e4)).records[0].aggregated  # control: a wider range


def test_a_client_sends_no_weight_beyond_the_range(log: pytest.LogCaptureFixture) -> None:
    far = LocalTraining(batch_size=4, steps=1, momentum=0.0)
    policy = {"payload": "float16", "rate": lambda round, rounds: 1e7}
    done = run(METHODS["gn"](), equal_clients(CLIENTS), 1, settings=far, policy=policy, may_fail=True)
    assert not done.records[0].aggregated
    assert "client 0 sits round 1 out: weights/" in log.text
    assert all(not message.content.array_records for message in done.grid.received if message.metadata.message_type == "train")


def trained(strategy: OwnAppStrategy, app: Any, rounds: int) -> tuple[dict[int, dict[str, np.ndarray]], set[str]]:
    """Run an app of one's own; return the tensors after each round, and the types of the weights that travelled to train."""
    found, grid = noted(strategy), WatchedGrid(app, CLIENTS)
    strategy.start(grid, num_rounds=rounds)
    messages = [*grid.train(1), *grid.train(1, replies=True)]
    return found, {str(array.dtype) for sections in messages for array in sections["weights"].values()}


def frozen() -> nn.Module:
    model = net()
    model[0].requires_grad_(False)
    return model


def frozen_start(payload: str, thaws: int = 0, **options: Any) -> dict[str, np.ndarray]:
    """Train two rounds of an app whose first layer is frozen; the first ``thaws`` clients let it learn. Return the tensors after them."""

    def loop(round: Any, batches: Any, rate: float) -> float:
        if any(torch.equal(batches[0][0], data(client)[0][0]) for client in range(thaws)):
            round.model[0].requires_grad_(True)
        return epoch(round, batches, rate)

    strategy = OwnAppStrategy(frozen(), METHODS["fedavg"](), fraction_evaluate=0, payload=payload, **options)
    return trained(strategy, own_app("fedavg", model=frozen, loop=loop), 2)[0][2]


@listed(("payload", "defence"), [*((one, NO_DEFENCE) for one in ("float32", *NARROW)), ("bfloat16", Defence(1, "median", "median"))])
def test_the_server_keeps_pretrained_weights_that_nobody_trains(payload: str, defence: Defence) -> None:
    """The clients' rounded copies do not replace them. With FedAvgM, the weights that learn have momentum."""
    after, before = frozen_start(payload, defence=defence, optimizer=fedavgm(learning_rate=0.5)), frozen().state_dict()
    for name, tensor in before.items():
        if name.startswith("0."):
            assert np.array_equal(after[name], tensor.numpy())
            rounded = tensor.bfloat16() if payload == "bfloat16" else tensor.half()
            assert not torch.equal(rounded.float(), tensor)  # control: rounding would change it
    assert not np.array_equal(after["3.weight"], before["3.weight"].numpy())


@listed("what", ["affine", "both", "statistics"])
def test_a_frozen_scale_stays_as_it_was_at_the_freeze(what: str) -> None:
    strategy = FixBN(net(), freeze_after=1, freeze_what=what, payload="bfloat16", fraction_evaluate=0)
    found, _ = trained(strategy, own_app(METHODS["fixbn"](freeze_after=1, freeze_what=what)), 3)
    first, last = found[1]["1.weight"], found[3]["1.weight"]
    assert np.array_equal(first, last) == (what != "statistics")
    assert not np.array_equal(torch.from_numpy(first).bfloat16().float().numpy(), first)  # control: rounding would change it
