"""precision='mixed' on the CPU: autocast computes in bfloat16, and everything that is kept, pooled, exchanged or sent stays float32."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fl_bn.methods import METHODS
from tests.conformance.cases import every_method
from tests.flower.inside import ExchangeSettings, LocalTraining, Samples
from tests.in_process import TWO_STEPS, Run, arrays_of, run, sections

Clients = Callable[..., list[Samples]]
MIXED = replace(TWO_STEPS, precision="mixed")
DSGD = LocalTraining(batch_size=64, steps=1, momentum=0.9, update="gradients", precision="mixed")


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
            for arrays in sections(message.content).values():
                yield from arrays.items()
    for state in ran.grid.states():
        for record in state.array_records.values():
            yield from arrays_of(record).items()


@pytest.mark.sample("[fedbn", "[hbn", "[fbn", "[fedtan-")
@pytest.mark.parametrize("settings", [MIXED, DSGD], ids=["weights", "gradients"])
@every_method
def test_what_travels_and_what_is_kept_stays_float32(
    method_name: str, settings: LocalTraining, clients: list[Samples], computed: dict[str, set[torch.dtype]]
) -> None:
    """What is exchanged within a step travels here, too, in messages."""
    policy = {"calibrate": 1, "exchange": ExchangeSettings("replay")}
    ran = run(METHODS[method_name](), clients, 2, settings=settings, policy=policy)
    wide = ("count", "num_batches_tracked")
    assert {str(array.dtype) for name, array in tensors(ran) if not name.endswith(wide)} <= {"float32", "uint8"}
    assert all(len(record.accepted) == 3 and record.aggregated for record in ran.records)
    assert computed == {"train": {torch.bfloat16}, "eval": computed["eval"]}  # control: autocast was on
    assert computed["eval"] <= {torch.float32}  # and off where statistics are measured


@pytest.mark.parametrize("name", ["fbn", "fedavg", "hbn"])
def test_statistics_of_bfloat16_activations_are_summed_in_float32(name: str, clients: list[Samples]) -> None:
    """Sums of thousands of bfloat16 numbers, with 8 bits each, would be off by percents: they are right to the activations' own error."""
    big = [Samples(c.x.repeat(12, 1, 1, 1), c.y.repeat(12)) for c in clients]
    method, settings = METHODS[name](), LocalTraining(batch_size=128, steps=1)
    frozen = {"rate": lambda round, rounds: 1e-12}
    plain, mixed = (run(method, big, 1, settings=replace(settings, precision=p), policy=frozen) for p in ("float32", "mixed"))
    a, b = (ran.trajectory[1] for ran in (plain, mixed))
    for key in (key for key in a if "running" in key):
        assert not np.array_equal(a[key], b[key]) or method.measures_first  # before training, in float32
        assert np.allclose(a[key], b[key], rtol=4e-3, atol=2e-3), key
