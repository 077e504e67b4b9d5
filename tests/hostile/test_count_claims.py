"""Moments weigh by the activations that a client counts: no count is believed that its samples, and the others' inputs, cannot have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from torch import nn
from torch.nn import functional as F

from fl_bn import Federation, convert, local_round, server_round, server_state
from fl_bn.exchange.call import Local, Quantity, Request
from fl_bn.exchange.session import Deliver, Session
from fl_bn.exchange.settings import ExchangeSettings
from fl_bn.federation.defence import Defence
from fl_bn.federation.engines.local import LocalTransport
from fl_bn.federation.record import RoundRecord
from fl_bn.federation.values import Reply
from fl_bn.methods import METHODS, Method
from fl_bn.moments import Moments
from fl_bn.support.stated_sizes import FAR, most_believed
from tests.costs import slow
from tests.doors.doors import apart
from tests.hostile import own_app
from tests.hostile.liars import LIAR, lied
from tests.in_process import Run, identical

HUGE = 2**53
COUNTS = [HUGE, 100_000]
OTHERS = [0, 2, 3, 4]


def counts(claim: int, section: str = "moments", message: str = "train", **told: int) -> Callable[[Message, str, RecordDict], None]:
    """Every count of the reply to ``message`` becomes ``claim``, and its numbers ``told``."""

    def spoil(instruction: Message, asked: str, content: RecordDict) -> None:
        if asked == message and f"fl-bn/{section}" in content.array_records:
            arrays = {name: array.numpy() for name, array in content.array_records[f"fl-bn/{section}"].items()}
            lies = {k: np.full_like(a, claim) if k.endswith("count") and a > 0 else a for k, a in arrays.items()}
            content[f"fl-bn/{section}"] = ArrayRecord({k: Array(a) for k, a in lies.items()})
            content["fl-bn/metrics"] = MetricRecord({**content.metric_records["fl-bn/metrics"], **told})

    return spoil


def check(records: list[RoundRecord], liar: int = LIAR) -> None:
    for record in records:
        assert record.aggregated
        assert [c.client for c in record.accepted] == [client for client in range(5) if client != liar]
        refused = record.clients[liar].refused
        assert "count: expected at most " in refused
        assert "64 times the median client's" in refused


# the application


def without_the_liar(name: str, **options: object) -> Run:
    return lied(lambda message, asked, content: content.clear() if asked == "train" else None, name, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("name", ["fbn", "hbn"])
def test_a_count_beyond_its_samples_costs_a_client_its_reply(name: str, count: int) -> None:
    """Before, the client's mean became the cohort's."""
    ran = lied(counts(count), name)
    check(ran.records)
    want = without_the_liar(name)
    assert [[c.client for c in record.accepted] for record in want.records] == [OTHERS] * 2
    assert identical(ran.trajectory[2], want.trajectory[2])


@pytest.mark.parametrize(("name", "told"), [("fbn", {"batch": HUGE}), ("hbn", {"measured": HUGE})])
def test_nor_does_it_help_to_claim_the_samples_too(name: str, told: dict[str, int]) -> None:
    """More than the client has, as it introduced itself, or than its reply says."""
    (field,) = told
    for record in lied(counts(HUGE, **told), name).records:
        assert [c.client for c in record.accepted] == OTHERS
        assert record.clients[LIAR].refused.startswith(f"metrics/{field}: expected at most ")


def test_in_a_statistics_exchange_too() -> None:
    ran = lied(counts(HUGE, message="query.statistics"), "fbn", policy={"calibrate": 1, "recalibration": "passes"})
    want = without_the_liar_s_statistics()
    assert identical(ran.trajectory[2], want.trajectory[2])


def without_the_liar_s_statistics() -> Run:
    silent = lambda message, asked, content: content.clear() if asked == "query.statistics" else None  # noqa: E731
    return lied(silent, "fbn", policy={"calibrate": 1, "recalibration": "passes"})


def test_under_a_defence_no_count_has_weight_and_none_is_refused() -> None:
    rule = Defence(1, "median", "median")
    claimed, honest = (lied(spoil, "fbn", defence=rule) for spoil in (counts(HUGE), counts(0, message="nothing")))
    assert [len(record.accepted) for record in claimed.records] == [5, 5]
    assert identical(claimed.trajectory[2], honest.trajectory[2])


# an app of one's own


@pytest.mark.parametrize("node", [slow(1), 3, slow(5)])
@pytest.mark.parametrize("name", ["fbn", "hbn"])
def test_in_an_app_of_one_s_own_too(name: str, node: int) -> None:
    """The first client's reply is added up before the others have come."""
    ran = own_app.lied(node, counts(HUGE), name)
    check(ran.records, node - 1)
    largest = max(float(tensor.abs().max()) for tensor in ran.trajectory[-1].values())
    assert largest < 100


# a loop of one's own


def pictures(size: int = 8) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))


class Twice(nn.Module):
    """Its second BatchNorm layer runs once for each of ``times``."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.first, self.norm, self.head, self.times = nn.BatchNorm1d(4), nn.BatchNorm1d(4), nn.Linear(4, 2), times

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for _ in range(self.times):
            x = self.norm(x)
        found: torch.Tensor = self.head(x)
        return found


def replied(state: object, net: nn.Module, method: Method, client: int, x: torch.Tensor, samples: int = 0, steps: int = 1) -> Reply:
    model = convert(net, method)
    with local_round(model, method, state.instruction()) as round:  # type: ignore[attr-defined]
        if method.name == "hbn":
            round.measure([(x, torch.zeros(len(x), dtype=torch.long))])
        round.batch(samples or len(x))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(steps):
            optimizer.zero_grad()
            F.cross_entropy(model(x[: samples or len(x)]), torch.zeros(samples or len(x), dtype=torch.long)).backward()
            optimizer.step()
    reply, _ = round.reply(samples or len(x), 1.0, client=client)
    return reply


def drawn(client: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(client)) + client


def claiming(reply: Reply, count: int) -> Reply:
    lies = {name: torch.tensor([count]) if name.endswith("count") else t for name, t in reply.sections["moments"].items()}
    return replace(reply, sections=reply.sections | {"moments": lies})


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize(("name", "options"), [("fbn", {}), ("fbn", {"report": "pass"}), ("fbn", {"report": "all"}), ("hbn", {})])
def test_in_server_round_too(name: str, options: dict[str, str], count: int) -> None:
    method = METHODS[name](**options)
    state = server_state(own_app.net(), method, rounds=2, clients=5)
    work = replied if options.get("report") != "pass" else partial(measured_first, replied)
    replies = [work(state, own_app.net(), method, client, drawn(client, 8, 4)) for client in range(5)]
    after, record = server_round(state, [claiming(r, count) if r.client == LIAR else r for r in replies])
    check([record])
    want, _ = server_round(state, [r for r in replies if r.client != LIAR])
    assert apart([after.shared.tensors()], [want.shared.tensors()]) == 0
    _, honest = server_round(state, replies)  # control
    assert len(honest.accepted) == 5


def measured_first(work: Callable[..., Reply], state: object, net: nn.Module, method: Method, client: int, x: torch.Tensor) -> Reply:
    model = convert(net, method)
    with local_round(model, method, state.instruction()) as round:  # type: ignore[attr-defined]
        round.measure([(x, torch.zeros(len(x), dtype=torch.long))])
        F.cross_entropy(model(x), torch.zeros(len(x), dtype=torch.long)).backward()
        torch.optim.SGD(model.parameters(), lr=0.01).step()
    return round.reply(len(x), 1.0, client=client)[0]


def test_steps_that_nobody_asked_for_weigh_no_more_than_the_others() -> None:
    """``all`` batches are reported: the count is checked by the steps, and the steps by the samples."""
    method = METHODS["fbn"](report="all", momentum=0.1)
    state = server_state(own_app.net(), method, rounds=2, clients=5)
    replies = [replied(state, own_app.net(), method, client, drawn(client, 8, 4), steps=2) for client in range(5)]
    lie = claiming(replace(replies[LIAR], metrics={**replies[LIAR].metrics, "steps": 2**40}), 2**43)
    _, record = server_round(state, [*replies[:LIAR], lie, *replies[LIAR + 1 :]])
    assert [c.client for c in record.accepted] == OTHERS
    assert (
        record.clients[LIAR].refused == "metrics/steps: expected at most 128, which is 64 times the median client's, but got 1099511627776"
    )


@pytest.mark.parametrize("name", ["fbn", "hbn"])
def test_in_federation_too(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose clients are in this process: one of them counts otherwise."""
    honest = LocalTransport._compute

    def lie(self: LocalTransport, asked: Any, client: int, *connect: Any) -> Reply:
        reply = honest(self, asked, client, *connect)
        return claiming(reply, HUGE) if client == LIAR and "moments" in reply.sections else reply

    monkeypatch.setattr(LocalTransport, "_compute", lie)
    loaders = [[(drawn(client, 8, 4), torch.zeros(8, dtype=torch.long))] for client in range(5)]
    records = list(Federation(own_app.net(), METHODS[name](), loaders, progress=False, calibrate=1).run(2))
    check(records)


# what honest clients may send


def union(parts: list[torch.Tensor]) -> Moments:
    return Moments.of(torch.cat([part.transpose(0, 1).flatten(1) for part in parts], dim=1).T)


def all_count(net: Callable[[], nn.Module], inputs: list[torch.Tensor], samples: list[int], name: str = "fbn") -> None:
    """A round of honest clients: nobody is refused, and the statistics are those of the union of their first batches."""
    method = METHODS[name](momentum=1.0) if name == "fbn" else METHODS[name](lam=1.0)
    state = server_state(net(), method, rounds=2, clients=len(inputs))
    replies = [replied(state, net(), method, client, x, most) for client, (x, most) in enumerate(zip(inputs, samples, strict=True))]
    after, record = server_round(state, replies)
    assert [c.refused for c in record.clients] == [""] * len(inputs)
    first = net()[0] if isinstance(net(), nn.Sequential) else nn.Identity()
    with torch.no_grad():
        seen = union([first(x if name == "hbn" else x[: most or len(x)]) for x, most in zip(inputs, samples, strict=True)])
    layer = next(layer for layer in after.model.modules() if isinstance(layer, nn.modules.batchnorm._BatchNorm))
    assert layer.running_mean is not None
    assert torch.allclose(layer.running_mean.double(), seen.mean, atol=1e-5)


def test_pictures_of_other_sizes_weigh_by_their_pixels() -> None:
    """The largest have 64 times the pixels of the smallest, of which most clients have some."""
    all_count(pictures, [drawn(i, 4, 1, size, size) for i, size in enumerate((10, 10, 10, 18, 50))], [0] * 5)


def test_batches_of_other_sizes_weigh_by_their_samples() -> None:
    all_count(pictures, [drawn(i, n, 1, 10, 10) for i, n in enumerate((2, 2, 2, 8, 500))], [0] * 5)


def test_who_trains_on_few_of_many_samples_may_measure_all() -> None:
    all_count(own_app.net, [drawn(i, n, 4) for i, n in enumerate((4, 4, 4, 16, 2000))], [2] * 5, "hbn")


def test_a_layer_may_run_more_often_at_one_client() -> None:
    method = METHODS["fbn"]()
    state = server_state(Twice(1), method, rounds=2, clients=4)
    replies = [replied(state, Twice(4 if client == 3 else 1), method, client, drawn(client, 8, 4)) for client in range(4)]
    assert int(replies[3].sections["moments"]["norm.count"]) == 32
    _, record = server_round(state, replies)
    assert [c.refused for c in record.clients] == [""] * 4


def test_a_layer_that_one_client_alone_runs_is_nobody_s_claim() -> None:
    method = METHODS["fbn"]()
    state = server_state(Twice(1), method, rounds=2, clients=4)
    replies = [replied(state, Twice(int(client == 3)), method, client, drawn(client, 8, 4)) for client in range(4)]
    _, record = server_round(state, replies)
    assert [c.refused for c in record.clients] == [""] * 4


# the exchange


def lies(monkeypatch: pytest.MonkeyPatch, quantity: Quantity, count: int) -> None:
    submit = Session.submit

    def lie(self: Session, client: int, request: Request, deliver: Deliver) -> None:
        if client == LIAR and isinstance(request, Local) and request.key.quantity is quantity:
            request = replace(request, count=count)
        submit(self, client, request, deliver)

    monkeypatch.setattr(Session, "submit", lie)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize(("schedule", "quantity"), [("merged", Quantity.MOMENTS), ("paper", Quantity.MEAN), ("paper", Quantity.VARIANCE)])
@pytest.mark.parametrize("carrier", ["local", "replay"])
def test_in_fedtan_s_exchange_too(carrier: str, schedule: str, quantity: Quantity, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    lies(monkeypatch, quantity, count)
    for policy in ("shrink", "abort"):
        rules = {"exchange": ExchangeSettings(carrier, policy)}
        ran = lied(lambda *of: None, "fedtan", policy=rules, may_fail=policy == "abort", chosen={"schedule": schedule})
        for record in ran.records:
            assert record.aggregated == (policy == "shrink")
            assert "activations per sample (64 times the median client's)" in record.clients[LIAR].refused
            if policy == "shrink":
                assert [c.client for c in record.accepted] == OTHERS


def test_in_an_exchange_of_statistics_layer_by_layer_too(monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture) -> None:
    lies(monkeypatch, Quantity.STATISTICS, HUGE)
    ran = lied(lambda *of: None, "fbn", policy={"calibrate": -1, "recalibration": "exchange"})
    assert f"exchange: client {LIAR}: refused: 1 (statistics): expected at most " in log.text
    monkeypatch.undo()
    want = lied(lambda *of: None, "fbn", policy={"calibrate": -1, "recalibration": "passes"})
    far = max(float(np.abs(ran.trajectory[2][name] - array).max()) for name, array in want.trajectory[2].items())
    assert far < 1e-5  # by passes, with everybody


# the rule


@pytest.mark.parametrize("claims", [[9.0], [9.0, 1e9], []])
def test_of_fewer_than_three_nobody_knows_who_is_wrong(claims: list[float]) -> None:
    assert most_believed(claims) == float("inf")


@pytest.mark.parametrize("lie", [0.001, 1.0, 1e9])
@pytest.mark.parametrize("honest", [[9.0, 9.0], [1.0, 64.0], [2.0, 3.0, 100.0], [1.0, 1.0, 1.0, 64.0]])
def test_one_claim_does_not_move_the_limit_out_of_the_honest_range(honest: list[float], lie: float) -> None:
    assert max(honest) <= most_believed([*honest, lie]) <= FAR * max(honest)
