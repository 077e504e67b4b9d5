"""Weights in half the bytes: a run's results to the rounding, its bytes, and what a side that lies may send."""

from __future__ import annotations

import logging
from typing import Any, cast

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Context, Message
from flwr.clientapp import ClientApp
from torch import nn
from torch.nn import functional as F

from fl_bn.federation.defence import NO_DEFENCE, Defence
from fl_bn.federation.optimizers import fedavgm
from fl_bn.federation.settings import LocalTraining
from fl_bn.flower import FBN, FixBN, InProcessGrid, OwnAppStrategy, RunFailed, answer, training
from fl_bn.flower.wire.codec import to_record
from fl_bn.methods import METHODS, attacked
from fl_bn.secure.settings import SecureAggregation
from tests.doors.test_flower import make_net, my_app
from tests.flower.byzantine import equal_clients
from tests.flower.own_apps import client_of, data, net, own_app
from tests.in_process import TWO_STEPS, Run, WatchedGrid, client_app, run
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


@pytest.mark.parametrize("payload", NARROW)
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


@pytest.mark.parametrize("payload", NARROW)
def test_a_run_stays_near_the_one_whose_weights_travel_as_they_are(payload: str) -> None:
    exact, near, again = ran("float32"), ran(payload), ran(payload)
    largest = max(float(np.abs(a).max()) for name, a in exact.trajectory[1].items() if learnt(name))

    def off(one: Run) -> float:
        return max(float(np.abs(a - one.trajectory[1][name]).max()) for name, a in exact.trajectory[1].items() if learnt(name))

    assert 0 < off(near) < 8 * NARROW[payload][1] * largest  # two roundings, the first of which two steps of training pass on
    assert all(np.array_equal(a, again.trajectory[1][name]) for name, a in near.trajectory[1].items())


@pytest.mark.parametrize(("method", "settings", "up"), [("fedavg", TWO_STEPS, "weights"), ("fbn", DSGD, "gradients")])
def test_bytes_are_halved_and_counted_so(method: str, settings: LocalTraining, up: str) -> None:
    (exact,), (half,) = (ran(payload, method, settings=settings).records for payload in ("float32", "bfloat16"))
    assert half.bytes_up[up] * 2 == exact.bytes_up[up]
    assert half.bytes_down["weights"] * 2 == exact.bytes_down["weights"]
    rest = [section for section in exact.bytes_up if section != up]
    assert rest
    assert all(half.bytes_up[section] == exact.bytes_up[section] for section in rest)  # statistics or moments
    assert [client.bytes_up for client in half.clients] == [sum(half.bytes_up.values())] * CLIENTS
    assert {d.nbytes for d in half.disclosures if d.section == up} == {half.bytes_up[up]}  # as it was received


def test_what_is_measured_and_evaluated_is_the_exact_model() -> None:
    done = run(METHODS["hbn"](), equal_clients(CLIENTS), 1, policy={"payload": "bfloat16", "calibrate": 1, "at_clients": True})
    asked: dict[str, set[str]] = {}
    for message in done.grid.sent:
        for name, array in message.content.array_records.get("fl-bn/weights", ArrayRecord()).items():
            asked.setdefault(message.metadata.message_type, set()).update({str(array.dtype)} if learnt(name) else set())
    assert asked == {"query.statistics": {"float32"}, "evaluate": {"float32"}, "train": {"uint16"}}


def lying(payload: str, lie: Any) -> Run:
    class Liar(WatchedGrid):
        def _answer(self, message: Message) -> Message:
            answer = super()._answer(message)
            if message.metadata.message_type == "train" and message.metadata.dst_node_id == CLIENTS:
                lie(answer)
            return answer

    method = METHODS["fedavg"]()
    return ran(payload, grid=Liar(client_app(method, equal_clients(CLIENTS)), CLIENTS))


def tensor(values: Any) -> Any:
    def put(answer: Message) -> None:
        weights = {name: array.numpy() for name, array in answer.content.array_records["fl-bn/weights"].items()}
        like = weights["9.bias"]
        answer.content["fl-bn/weights"] = to_record(weights | {"9.bias": values(like)})

    return put


def other_header(answer: Message) -> None:
    answer.content.config_records["fl-bn/header"]["payload"] = "float32"


LIES = {
    "another type": (tensor(lambda a: np.zeros(a.shape, np.float32)), "weights/9.bias: expected bfloat16 as uint16"),
    "float16 patterns": (tensor(lambda a: np.zeros(a.shape, np.float16)), "weights/9.bias: expected bfloat16 as uint16"),
    "signed patterns": (tensor(lambda a: a.view(np.int16)), "weights/9.bias: expected bfloat16 as uint16"),
    "NaN patterns": (tensor(lambda a: np.full(a.shape, 0x7FC1, np.uint16)), "weights/9.bias: 4 of 4 values are not finite"),
    "Inf patterns": (tensor(lambda a: np.full(a.shape, 0xFF80, np.uint16)), "weights/9.bias: 4 of 4 values are not finite"),
    "another shape": (tensor(lambda a: a[:2]), "weights/9.bias: expected shape (4,), but got (2,)"),
    "another header": (other_header, "header/payload: expected 'bfloat16', but got 'float32'"),
}


@pytest.mark.parametrize("case", LIES)
def test_a_reply_in_another_form_is_refused_by_name(case: str) -> None:
    lie, says = LIES[case]
    (record,) = lying("bfloat16", lie).records
    assert {c.client: c.refused[: len(says)] for c in record.clients if c.refused} == {CLIENTS - 1: says}
    assert record.aggregated


def test_control_honest_patterns_are_taken() -> None:
    (record,) = lying("bfloat16", tensor(lambda a: a.copy())).records
    assert len(record.accepted) == CLIENTS


def huge(scale: float) -> nn.Module:
    model = seeded_network("cnn")
    with torch.no_grad():
        model[9].bias.fill_(scale)  # type: ignore[index]
    return model


def test_the_server_sends_no_weight_beyond_the_range() -> None:
    grid = WatchedGrid(client_app(METHODS["fedavg"](), equal_clients(CLIENTS), model=huge(7e4)), CLIENTS)
    with pytest.raises(RunFailed, match="weights/9.bias: 4 of 4 values are beyond 65504"):
        ran("float16", grid=grid, model=huge(7e4))
    assert not grid.train(1)
    assert ran("bfloat16", grid=grid, model=huge(7e4)).records[0].aggregated  # control: a wider range


def test_a_client_sends_no_weight_beyond_the_range(log: pytest.LogCaptureFixture) -> None:
    log.set_level(logging.WARNING)
    far = LocalTraining(batch_size=4, steps=1, momentum=0.0)
    policy = {"payload": "float16", "rate": lambda round, rounds: 1e7}
    done = run(METHODS["gn"](), equal_clients(CLIENTS), 1, settings=far, policy=policy, may_fail=True)
    assert not done.records[0].aggregated
    assert "client 0 sits round 1 out: weights/" in log.text
    assert "are beyond 65504" in log.text
    assert all(not message.content.array_records for message in done.grid.received if message.metadata.message_type == "train")


def test_byzantine_clients_lie_in_the_same_type() -> None:
    for payload, (wire, _) in NARROW.items():
        method = attacked(METHODS["fedavg"](), "sign-flip", 1, "updates", 0.0)
        done = run(method, equal_clients(CLIENTS), 1, policy={"payload": payload})
        honest = ran(payload)
        assert len(done.records[0].accepted) == CLIENTS
        assert {str(a.dtype) for message in done.grid.train(1, replies=True) for n, a in message["weights"].items() if learnt(n)} == {wire}
        assert not np.array_equal(done.trajectory[1]["9.weight"], honest.trajectory[1]["9.weight"])


def test_secure_sums_have_no_rounded_parts() -> None:
    with pytest.raises(ValueError, match="set payload-dtype to 'float32'"):
        ran("bfloat16", "fbn", secure=SecureAggregation())


def test_an_app_of_ones_own_answers_in_the_type_that_it_was_asked_in() -> None:
    class Noting(InProcessGrid):
        def _answer(self, message: Message) -> Message:
            answer = super()._answer(message)
            if message.metadata.message_type == "train":
                for one in (message, answer):
                    found.update(str(array.dtype) for array in one.content.array_records["fl-bn/weights"].values())
            return answer

    def trained(payload: str) -> list[dict[str, np.ndarray]]:
        torch.manual_seed(3)
        strategy = FBN(make_net(), fraction_evaluate=0, payload=payload)
        found = noted(strategy)
        grid = Noting(my_app(METHODS["fbn"]()), 3, {})
        strategy.start(grid, num_rounds=1)
        return list(found.values())

    found: set[str] = set()
    exact = trained("float32")[-1]
    assert found == {"float32"}
    found = set()
    half = trained("bfloat16")[-1]
    assert found == {"uint16"}
    assert 0 < max(float(np.abs(exact[k] - half[k]).max()) for k in exact) < 0.05


def pretrained() -> nn.Sequential:
    model = net()
    model[0].requires_grad_(False)
    return model


def frozen_start(payload: str, thaws: int = 0, **options: Any) -> dict[str, np.ndarray]:
    """Train two rounds of an app whose first layer is frozen; the first ``thaws`` clients let it learn. Return the tensors after them."""
    method, app = METHODS["fedavg"](), ClientApp()
    answer(app, pretrained, method, lambda context: data(client_of(context)))

    @app.train()
    def train(message: Message, context: Context) -> Message:
        client = client_of(context)
        with training(message, context, pretrained(), method, data(client)) as round:
            if client < thaws:
                round.model[0].requires_grad_(True)
            for x, y in data(client):
                optimizer = torch.optim.SGD([p for p in round.model.parameters() if p.requires_grad], 0.1)
                F.cross_entropy(round.model(x), y).backward()
                optimizer.step()
        return round.message(16)

    strategy = OwnAppStrategy(pretrained(), method, fraction_evaluate=0, payload=payload, **options)
    found = noted(strategy)
    strategy.start(InProcessGrid(app, 3, {}), num_rounds=2)
    return cast(dict[str, np.ndarray], found[2])


@pytest.mark.parametrize("payload", ["float32", *NARROW])
@pytest.mark.parametrize("defence", [NO_DEFENCE, Defence(1, "median", "median")], ids=["mean", "median"])
def test_the_server_keeps_pretrained_weights_that_nobody_trains(payload: str, defence: Defence) -> None:
    """The clients' rounded copies do not replace them. With FedAvgM, the weights that learn have momentum."""
    after, before = frozen_start(payload, defence=defence, optimizer=fedavgm(learning_rate=0.5)), pretrained().state_dict()
    for name, tensor in before.items():
        if name.startswith("0."):
            assert np.array_equal(after[name], tensor.numpy())
            rounded = tensor.bfloat16() if payload == "bfloat16" else tensor.half()
            assert not torch.equal(rounded.float(), tensor)  # control: rounding would change it
    assert not np.array_equal(after["3.weight"], before["3.weight"].numpy())


@pytest.mark.parametrize("payload", ["float32", *NARROW])
@pytest.mark.parametrize("thaws", [1, 3])
def test_weights_that_some_loop_lets_learn_are_averaged(payload: str, thaws: int) -> None:
    after, exact, before = frozen_start(payload, thaws), frozen_start("float32", thaws), pretrained().state_dict()["0.weight"].numpy()
    moved = np.abs(exact["0.weight"] - before).max()
    assert moved > 0.01
    assert np.abs(after["0.weight"] - exact["0.weight"]).max() < moved / 4


@pytest.mark.parametrize("what", ["affine", "both", "statistics"])
def test_a_frozen_scale_stays_as_it_was_at_the_freeze(what: str) -> None:
    strategy = FixBN(net(), freeze_after=1, freeze_what=what, payload="bfloat16", fraction_evaluate=0)
    found = noted(strategy)
    strategy.start(InProcessGrid(own_app(METHODS["fixbn"](freeze_after=1, freeze_what=what)), 3, {}), num_rounds=3)
    first, last = found[1]["1.weight"], found[3]["1.weight"]
    assert np.array_equal(first, last) == (what != "statistics")
    assert not np.array_equal(torch.from_numpy(first).bfloat16().float().numpy(), first)  # control: rounding would change it
