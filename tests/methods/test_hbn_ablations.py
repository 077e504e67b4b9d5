"""HBN's ablations and the paper's way of evaluating, against rounds that are transcribed in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from fl_bn.federation.defence import NO_DEFENCE
from fl_bn.federation.local import Samples
from fl_bn.federation.rounds import Rounds
from fl_bn.federation.settings import LocalTraining
from fl_bn.flower.secagg.rounds import check_secure
from fl_bn.methods.hbn import hbn
from fl_bn.secure.settings import SecureAggregation
from tests.doors.doors import federation as federation_door
from tests.doors.doors import wide
from tests.in_process import Run, WatchedGrid, client_app, run
from tests.networks import seeded_network
from tests.oracles.hbn_rounds import Ablation, Client, Server

SIZES, EXACT, WRONG, LAM, STEPS, ROUNDS = (3, 7, 5), 1e-11, 1e-6, 0.3, 3, 2
Clients = Callable[..., list[Samples]]
Options = dict[str, object]

ABLATIONS: dict[str, tuple[Options, Ablation]] = {
    "none": ({}, Ablation()),
    "1": ({"separate": False}, Ablation(moving=True)),
    "2": ({"merge": "average"}, Ablation(averaged=True)),
    "3": ({"mixing": "shared"}, Ablation(mixing="global")),
    "4": ({"mixing": "batch"}, Ablation(mixing="batch")),
    "5": ({"mixing": "half"}, Ablation(mixing="half")),
    "the authors' pass": ({"measured": "normalisers"}, Ablation(mixture=True)),
    "1 and 2": ({"separate": False, "merge": "average"}, Ablation(moving=True, averaged=True)),
}


def trained(clients: list[Samples], options: Options, fraction: float = 1.0) -> Run:
    settings = LocalTraining(batch_size=64, steps=STEPS)
    method = hbn(lam=LAM, evaluate_clients="cohort", **options)  # type: ignore[arg-type]
    model = seeded_network("plain", dtype=torch.float64)
    return run(method, clients, ROUNDS, settings=settings, model=model, policy={"fraction": fraction})


def by_oracle(clients: list[Samples], ablation: Ablation, cohorts: list[list[int]]) -> Server:
    like = torch.zeros((), dtype=torch.float64)
    data = [Client(*samples.batch(np.arange(len(samples)), like)) for samples in clients]
    server = Server(seeded_network("plain", dtype=torch.float64), data, LAM, ablation)  # type: ignore[arg-type]
    for cohort in cohorts:
        server.round(STEPS, 0.1, cohort)
    return server


def cohorts_of(ran: Run) -> list[list[int]]:
    return [[client.client for client in record.clients] for record in ran.records]


def off(ran: Run, want: Server) -> dict[str, float]:
    """Largest deviation of the weights, the global statistics and the evaluated statistics after the last round."""
    found = {name: torch.from_numpy(array) for name, array in ran.trajectory[ROUNDS].items()}
    trainable = dict(want.net.named_parameters())
    weights = max(float((found[name] - p).detach().abs().max()) for name, p in trainable.items())
    evaluated = max(
        float((found[f"{place}.running_{what}"] - t).abs().max())
        for place, pair in want.evaluated.items()
        for what, t in zip(("mean", "var"), pair, strict=True)
    )
    return {"weights": weights, "evaluated": evaluated}


@pytest.mark.parametrize("name", ABLATIONS)
def test_each_ablation_is_the_transcribed_one_and_no_other(name: str, tiny_clients: Clients) -> None:
    clients = tiny_clients(SIZES)
    options, ablation = ABLATIONS[name]
    ran = trained(clients, options)
    found = off(ran, by_oracle(clients, ablation, cohorts_of(ran)))
    assert max(found.values()) < EXACT, found
    for other, (_, wrong) in ABLATIONS.items():  # control: the other rows of the table
        if other != name:
            assert max(off(ran, by_oracle(clients, wrong, cohorts_of(ran))).values()) > WRONG, other


@pytest.mark.parametrize("options", [{}, {"separate": False}], ids=["by a pass", "as reported"])
def test_the_cohort_s_statistics_are_evaluated(options: Options, tiny_clients: Clients) -> None:
    clients = tiny_clients((4, 7, 5, 6))
    ran = trained(clients, options, fraction=0.5)
    cohorts = cohorts_of(ran)
    assert [len(cohort) for cohort in cohorts] == [2, 2]
    ablation = Ablation(moving=bool(options))
    found = off(ran, by_oracle(clients, ablation, cohorts))
    assert max(found.values()) < EXACT, found
    asked = [m for m in ran.grid.sent if m.metadata.message_type == "query.statistics" and m.metadata.group_id == str(ROUNDS)]
    assert len(asked) == (0 if options else 2)
    everyone = by_oracle(clients, ablation, cohorts)
    everyone.evaluated = everyone.synchronised(list(range(len(clients))))  # control: all clients
    assert off(ran, everyone)["evaluated"] > WRONG


def test_by_default_all_clients_are_asked(tiny_clients: Clients) -> None:
    ran = run(hbn(), tiny_clients((4, 7, 5, 6)), 1, policy={"fraction": 0.5})
    assert sum(m.metadata.message_type == "query.statistics" and m.metadata.group_id == "1" for m in ran.grid.sent) == 4


@pytest.mark.parametrize("name", ["1", "3", "the authors' pass"])
def test_the_federation_in_one_process_does_the_same(name: str, tiny_clients: Clients) -> None:
    clients, options = tiny_clients(SIZES), ABLATIONS[name][0]
    method = hbn(lam=LAM, evaluate_clients="cohort", **options)  # type: ignore[arg-type]
    size = max(SIZES)  # one batch an epoch
    model = seeded_network("plain", dtype=torch.float64)
    plain = federation_door(model, method, wide(clients), ROUNDS, size, NO_DEFENCE)[-1]
    applied = run(method, clients, ROUNDS, settings=LocalTraining(batch_size=size, epochs=1, momentum=0.9), model=model)
    other = federation_door(model, hbn(lam=LAM), wide(clients), ROUNDS, size, NO_DEFENCE)[-1]
    assert largest(plain, applied) < EXACT
    assert largest(other, applied) > WRONG  # control: HBN as it is by default


@pytest.mark.parametrize("name", ["1", "3", "the authors' pass"])
def test_one_program_for_all_clients_does_the_same(name: str, tiny_clients: Clients) -> None:
    clients, model = tiny_clients((6, 6, 6)), seeded_network("plain", dtype=torch.float64)
    method = hbn(lam=LAM, evaluate_clients="cohort", **ABLATIONS[name][0])  # type: ignore[arg-type]
    runs = [
        run(method, clients, ROUNDS, model=model, grid=WatchedGrid(client_app(method, clients, model=model), 3, engine=engine))
        for engine in ("sequential", "vectorised")
    ]
    assert largest({k: torch.from_numpy(a) for k, a in runs[0].trajectory[ROUNDS].items()}, runs[1]) < EXACT
    assert largest({k: torch.from_numpy(a) for k, a in runs[0].trajectory[1].items()}, runs[1]) > WRONG  # control: a round before


def largest(found: dict[str, torch.Tensor], ran: Run) -> float:
    return max(float(np.abs(tensor.numpy() - ran.trajectory[ROUNDS][key]).max()) for key, tensor in found.items())


def test_a_fixed_mixture_does_not_learn_and_stays_at_home(tiny_clients: Clients) -> None:
    ran = trained(tiny_clients(SIZES), {"mixing": "half"})
    for state in ran.grid.states():
        kept = {k: a.numpy() for k, a in state.array_records["fl-bn/local"].items()}
        assert [set(array.tolist()) for name, array in kept.items() if name.endswith("mixing_logit")] == [{0.0}, {0.0}]
    learned = trained(tiny_clients(SIZES), {}).grid.states()[0].array_records["fl-bn/local"]
    assert any(array.numpy().any() for name, array in learned.items() if name.endswith("mixing_logit"))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"separate": False}, "set evaluate_clients to 'cohort'"),
        ({"separate": False, "evaluate_clients": "cohort", "stat_samples": 64}, "hbn's stat_samples needs a statistics pass"),
        ({"separate": False, "evaluate_clients": "cohort", "measured": "normalisers"}, "hbn's measured needs a statistics pass"),
        ({"separate": False, "evaluate_clients": "cohort", "evaluate": "exact"}, "hbn's evaluate needs a statistics pass"),
        ({"mixing": "shared", "measured": "normalisers"}, "would never change"),
        ({"measured": "normalisers", "lower_layers": "shared"}, "set lower_layers to 'hybrid'"),
        ({"merge": "average", "lam": 1.0}, "set evaluate to 'hybrid'"),
        ({"mixing": "none"}, "mixing must be one of learned, half, batch, shared, but got 'none'"),
    ],
)
def test_an_option_without_effect_is_refused(options: Options, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        hbn(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize("options", [{"separate": False}, {"merge": "average"}])
def test_sums_alone_cannot_do_what_needs_single_reports(options: Options) -> None:
    settings, rounds = SecureAggregation(), Rounds(clients=3)
    with pytest.raises(ValueError, match="needs each client's own here"):
        check_secure(settings, hbn(evaluate_clients="cohort", **options), rounds, NO_DEFENCE)  # type: ignore[arg-type]
    check_secure(settings, hbn(evaluate_clients="cohort"), rounds, NO_DEFENCE)
