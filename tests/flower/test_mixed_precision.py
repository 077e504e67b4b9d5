"""precision='mixed' on the CPU: autocast computes in bfloat16, and everything that is kept, pooled or sent stays float32."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fl_bn.exchange.settings import ExchangeSettings
from fl_bn.federation.local import Samples
from fl_bn.federation.payload import decode_moments, to_tensors
from fl_bn.federation.settings import LocalTraining
from fl_bn.methods import METHODS
from fl_bn.methods.fedtan import exchanging, fedtan
from fl_bn.observation import observe
from tests.costs import common_first
from tests.in_process import TWO_STEPS, Run, arrays_of, identical, run, sections
from tests.networks import seeded_network

Clients = Callable[..., list[Samples]]
MIXED = replace(TWO_STEPS, precision="mixed")
DSGD = LocalTraining(batch_size=64, steps=1, momentum=0.9, update="gradients")
EXCHANGING = ("fedtan", "fedtan2", "fedavg-alg2")


@pytest.fixture
def clients(tiny_clients: Clients) -> list[Samples]:
    return tiny_clients((6, 4, 5))


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> dict[str, set[torch.dtype]]:
    """The dtypes that convolutions and linear layers gave, in training and in evaluation (statistics passes included)."""
    seen: dict[str, set[torch.dtype]] = {"train": set(), "eval": set()}
    for kind in (nn.Conv2d, nn.Linear):
        forward = kind.forward

        def noting(self: nn.Module, x: Tensor, forward: Callable[..., Tensor] = forward) -> Tensor:
            out = forward(self, x)
            seen["train" if torch.is_grad_enabled() else "eval"].add(out.dtype)
            return out

        monkeypatch.setattr(kind, "forward", noting)
    return seen


def tensors(ran: Run) -> Iterator[tuple[str, np.ndarray]]:
    """Everything that travelled, in both directions, and everything that a client kept."""
    for message in [*ran.grid.sent, *ran.grid.received]:
        if message.has_content():
            for section, arrays in sections(message.content).items():
                yield from ((f"{section}/{name}", array) for name, array in arrays.items())
    for state in ran.grid.states():
        for section, record in state.array_records.items():
            yield from ((f"kept/{section}/{name}", array) for name, array in arrays_of(record).items())


@pytest.mark.parametrize("settings", [MIXED, replace(DSGD, precision="mixed")], ids=["weights", "gradients"])
@pytest.mark.parametrize("name", METHODS)
def test_what_travels_and_what_is_kept_stays_float32(
    name: str, settings: LocalTraining, clients: list[Samples], computed: dict[str, set[torch.dtype]]
) -> None:
    ran = run(METHODS[name](), clients, 2, settings=settings, policy={"calibrate": 1})
    wide = ("count", "num_batches_tracked")
    found = {(name.split("/")[0], str(array.dtype)) for name, array in tensors(ran) if not name.endswith(wide)}
    assert {dtype for _, dtype in found} == {"float32"}, found
    assert all(len(record.accepted) == 3 and record.aggregated for record in ran.records)
    assert computed == {"train": {torch.bfloat16}, "eval": computed["eval"]}  # control: autocast was on
    assert computed["eval"] <= {torch.float32}  # and off where statistics are measured


def largest(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> float:
    return max(float(np.abs(a[k].astype("float64") - b[k]).max()) for k in a if a[k].dtype.kind == "f")


@pytest.mark.parametrize("name", common_first(name for name in METHODS if name != "single"))  # of which nothing is to be seen
def test_it_is_another_run_but_a_close_one(name: str, clients: list[Samples], computed: dict[str, set[torch.dtype]]) -> None:
    method = METHODS[name]()
    plain = run(method, clients, 2)
    assert computed["train"] == {torch.float32}  # control: autocast is off where nobody asked for it
    mixed = run(method, clients, 2, settings=MIXED)
    moved = largest(plain.trajectory[2], plain.trajectory[1])
    apart = largest(plain.trajectory[2], mixed.trajectory[2])
    assert 0 < apart < 0.03
    assert apart < 0.5 * moved + 0.01  # by less than a round moves it
    assert not identical(plain.trajectory[1], mixed.trajectory[1])
    losses = zip(plain.records, mixed.records, strict=True)
    assert all(0 < abs(a.loss - b.loss) < 0.05 * a.loss for a, b in losses)


def test_it_is_reproducible(clients: list[Samples]) -> None:
    a, b = (run(METHODS["hbn"](), clients, 2, settings=MIXED) for _ in range(2))
    assert identical(a.trajectory[2], b.trajectory[2])


# Statistics


@pytest.mark.parametrize("name", ["fbn", "fedavg", "hbn"])
def test_statistics_of_bfloat16_activations_are_summed_in_float32(name: str, clients: list[Samples]) -> None:
    """Sums of thousands of bfloat16 numbers, with 8 bits each, would be off by percents: they are right to the activations' own error."""
    big = [Samples(c.x.repeat(12, 1, 1, 1), c.y.repeat(12)) for c in clients]
    method, settings = METHODS[name](), LocalTraining(batch_size=128, steps=1)
    frozen = {"rate": lambda round, rounds: 1e-12}
    plain, mixed = (run(method, big, 1, settings=replace(settings, precision=p), policy=frozen) for p in ("float32", "mixed"))
    a, b = (ran.trajectory[1] for ran in (plain, mixed))
    for key in (key for key in a if "running" in key):
        assert not np.array_equal(a[key], b[key]) or name == "hbn"
        assert np.allclose(a[key], b[key], rtol=4e-3, atol=2e-3), key


def test_moments_that_clients_report_are_those_of_what_the_layers_saw(clients: list[Samples]) -> None:
    """FBN's report of one batch: recomputed in float64 from the very bfloat16 activations."""
    model, images = seeded_network("plain"), torch.from_numpy(np.random.default_rng(0).normal(size=(8, 3, 8, 8)).astype("float32"))
    with observe(model) as observed, torch.autocast("cpu", torch.bfloat16):
        model.train()(images)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        x = model[0](images)  # type: ignore[index]
    assert x.dtype == torch.bfloat16
    (moments,) = observed["1"]
    exact = x.double()
    assert torch.allclose(moments.mean.double(), exact.mean((0, 2, 3)), rtol=1e-5, atol=1e-6)
    assert torch.allclose(moments.var.double(), exact.var((0, 2, 3), unbiased=False), rtol=1e-5)
    narrow = x.float().sum((0, 2, 3)).bfloat16() / x[:, 0].numel()
    assert not torch.allclose(narrow.double(), exact.mean((0, 2, 3)), rtol=1e-5, atol=1e-6)  # control


@pytest.mark.parametrize("name", ["fbn", "hbn"])
def test_reported_moments_are_float32_on_the_wire_and_close(name: str, clients: list[Samples]) -> None:
    method = METHODS[name]()
    plain, mixed = (run(method, clients, 1, settings=settings) for settings in (TWO_STEPS, MIXED))
    for a, b in zip(plain.grid.train(1, replies=True), mixed.grid.train(1, replies=True), strict=True):
        ours, theirs = decode_moments(to_tensors(a["moments"])), decode_moments(to_tensors(b["moments"]))
        for layer in ours:
            assert ours[layer].count == theirs[layer].count
            assert torch.allclose(ours[layer].mean, theirs[layer].mean, atol=0.02)
            assert torch.allclose(ours[layer].var, theirs[layer].var, rtol=0.05, atol=0.01)
        assert (name == "hbn") == identical(a["moments"], b["moments"])  # HBN measures before training, in float32


# FedTAN's exchange


@pytest.mark.parametrize("name", EXCHANGING)
@pytest.mark.parametrize("carrier", ["local", "replay"])
def test_what_is_exchanged_stays_float32(name: str, carrier: str, clients: list[Samples], monkeypatch: pytest.MonkeyPatch) -> None:
    exchanged: list[Tensor] = []

    def watching(model: nn.Module, exchange: Callable[..., object]) -> object:
        class Watched:
            def __getattr__(self, name: str) -> object:
                return getattr(exchange, name)

            def __call__(self, key: object, local: Tensor, count: int) -> object:
                answer = exchange(key, local, count)
                exchanged.extend([local, answer.values])  # type: ignore[attr-defined]
                return answer

        return exchanging(model, Watched())  # type: ignore[arg-type]

    monkeypatch.setattr("fl_bn.federation.first_batch.exchanging", watching)
    ran = run(METHODS[name](), clients, 2, settings=MIXED, policy={"exchange": ExchangeSettings(carrier=carrier)})
    assert ran.records[0].aggregated
    assert len(exchanged) >= 2 * 3 * 2
    assert {t.dtype for t in exchanged} == {torch.float32}


def test_fedtans_first_step_is_nearly_the_centralised_one_in_mixed_precision_too(clients: list[Samples]) -> None:
    """All clients, full batches, one step: off the exact float32 one by no more than bfloat16 does to one network in one step."""
    whole = [Samples(torch.cat([c.x for c in clients]), torch.cat([c.y for c in clients]))]
    one = LocalTraining(batch_size=64, steps=1)
    both = {
        precision: [
            run(fedtan(), who, 1, settings=replace(one, precision=precision), model=seeded_network("plain")) for who in (clients, whole)
        ]
        for precision in ("float32", "mixed")
    }
    exact = largest(*(ran.trajectory[1] for ran in both["float32"]))
    mixed = largest(*(ran.trajectory[1] for ran in both["mixed"]))
    rounding = largest(both["float32"][1].trajectory[1], both["mixed"][1].trajectory[1])
    assert exact < 1e-5
    assert mixed < 2 * rounding
