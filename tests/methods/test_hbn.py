"""HBN's options, and its passes over clients' data: how many samples they take, and that they change nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from fl_bn.federation.local import Samples
from fl_bn.federation.settings import LocalTraining
from fl_bn.methods import METHODS
from fl_bn.secure.settings import SecureAggregation
from tests.in_process import WatchedGrid, client_app, run

hbn, N, SPOTS = METHODS["hbn"], 200, 36  # samples of a client; values per sample and channel behind the convolution
STEPS = LocalTraining(batch_size=4, steps=2)


def samples(n: int = N) -> Samples:
    rng = torch.Generator().manual_seed(n)
    return Samples(torch.randint(0, 256, (n, 3, 8, 8), generator=rng, dtype=torch.uint8), torch.arange(n) * 3 // n)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
@pytest.mark.parametrize(
    ("settings", "options", "expected"),
    [
        (STEPS, {}, 64),
        (LocalTraining(batch_size=4, epochs=1), {}, N),
        (LocalTraining(batch_size=4, steps=2, weigh_all=True), {}, N),  # a client that counts for all it has
    ],
)
def test_it_takes_as_many_as_the_client_trains_on(settings: LocalTraining, options: dict[str, int], expected: int, engine: str) -> None:
    method = hbn(**options)
    grid = WatchedGrid(client_app(method, [samples()] * 2, settings, model=network()), 2, engine=engine)
    for reply in run(method, [samples()] * 2, 1, settings=settings, model=network(), grid=grid).grid.train(1, replies=True):
        assert reply["moments"]["1.count"].item() == expected * SPOTS


def test_they_are_random_ones() -> None:
    """The samples are sorted by class, so the first 64 are of one class alone."""
    own = samples()
    own.x[: N // 3] = 0
    first = Samples(own.x[:64], own.y[:64])
    (found, alone) = run(hbn(), [own, first], 1, settings=STEPS, model=network()).grid.train(1, replies=True)
    assert float(found["moments"]["1.var"].min()) > 10 * float(alone["moments"]["1.var"].max())


def test_by_default_all_clients_are_asked(tiny_clients: Callable[..., list[Samples]]) -> None:
    ran = run(hbn(), tiny_clients((4, 7, 5, 6)), 1, policy={"fraction": 0.5})
    assert sum(m.metadata.message_type == "query.statistics" and m.metadata.group_id == "1" for m in ran.grid.sent) == 4
    assert hbn().other_fraction(0.5)  # said, unless the option is given or all take part
    assert not hbn().other_fraction(1.0)
    assert not hbn(fraction=0.5).other_fraction(0.5)
    assert [hbn(lam=lam).refresh.value for lam in (1.0, 0.99, 0.01)] == ["exact", "hybrid", "hybrid"]


def test_sums_alone_cannot_do_what_needs_single_reports(tiny_clients: Callable[..., list[Samples]]) -> None:
    for options in ({"separate": False}, {"merge": "average"}):
        with pytest.raises(ValueError, match="hbn-merge"):
            run(hbn(evaluate_clients="cohort", **options), tiny_clients((4, 4, 4)), 1, secure=SecureAggregation())


def test_the_statistics_of_a_share_of_the_clients_weigh_less_than_those_of_all() -> None:
    weights = [hbn(fraction=share).combine.keywords["tracking"] for share in (1.0, 0.5)]  # type: ignore[union-attr]
    assert weights == [0.05, 0.01]
