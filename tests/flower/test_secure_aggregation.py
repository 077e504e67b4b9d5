"""Statistics under SecAgg+: the same as without it, up to a stated error; and the server sees nobody's own."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from flwr.app import Message
from flwr.common.secure_aggregation.secaggplus_utils import pseudo_rand_gen
from ray import cloudpickle
from scipy.stats import kstest

from fl_bn.bn.moments import Running
from fl_bn.flower.secagg import masks, workflow
from fl_bn.flower.secagg.sums import Plan, Weighting, additive, flags, layout, references, to_vector
from fl_bn.methods import METHODS, NORMALISERS, Phase, fbn, hbn
from fl_bn.secure.additive import average_error, moments_error, scale
from tests.flower.inside import Samples, SecureAggregation, to_tensors
from tests.flower.secure_runs import LosingGrid, masked_vectors, measured, shows, stage_of, strategy
from tests.in_process import WatchedGrid, client_app, identical, run, sections

Clients = Callable[..., list[Samples]]
SIZES = (6, 4, 5)
FEDAVG = METHODS["fedavg"]()


@pytest.fixture
def clients(tiny_clients: Clients) -> list[Samples]:
    return tiny_clients(SIZES)


def test_a_sum_that_could_exceed_32_bits_is_refused() -> None:
    SecureAggregation(quantization_range=30).check(3)
    with pytest.raises(ValueError, match="set secagg-quantization-range to 29 or less"):
        SecureAggregation(quantization_range=30).check(4)
    SecureAggregation(quantization_range=29).check(4)


def at_rest(clients: list[Samples]) -> dict[str, np.ndarray]:
    """The network with statistics that a further exchange would not change: two layers need two."""
    return measured(hbn(), clients, None, measured(hbn(), clients, None)[0])[0]


def largest_error(clients: list[Samples], bits: int) -> tuple[float, float]:
    """Of a secure exchange about statistics near the data: (largest error of a mean or variance, the same over its bound)."""
    near = at_rest(clients)
    plain, _ = measured(hbn(), clients, None, near)
    found, grid = measured(hbn(), clients, SecureAggregation(quantization_range=bits), near)
    error = average_error(8.0, bits, SIZES)
    largest, relative = 0.0, 0.0
    for layer in ("1", "5"):
        reference = Running(*(torch.from_numpy(near[f"{layer}.running_{key}"]).double() for key in ("mean", "var")))
        first = (torch.from_numpy(plain[f"{layer}.running_mean"]).double() - reference.mean) / scale(reference)
        bounds = moments_error(first, reference, error, 8.0)
        for key, bound in zip(("mean", "var"), bounds, strict=True):
            name = f"{layer}.running_{key}"
            off = np.abs(found[name].astype("float64") - plain[name])
            allowed = bound.numpy() * 1.01 + 2e-7 * np.abs(plain[name])  # the unbiased variance is a little larger, and both are float32
            largest, relative = max(largest, float(off.max())), max(relative, float((off / allowed).max()))
    return largest, relative


@pytest.mark.sample(3)
@pytest.mark.parametrize("bits", [8, 12, 16, 22, 28])
def test_secure_statistics_are_the_plain_ones_up_to_the_bound(bits: int, clients: list[Samples]) -> None:
    largest, relative = largest_error(clients, bits)
    assert largest > 0 or bits > 22
    assert relative <= 1
    if bits <= 16:  # control: with the bound of 64 times as many levels it would not hold
        assert relative > 1 / 64


def test_what_training_normalises_with_is_summed_without_a_client_that_has_no_training_batch(tiny_clients: Clients) -> None:
    """One sample makes no batch; its counts of 0 would be unlike the others', and nobody's could be summed."""
    few = tiny_clients((6, 1, 5, 7))
    near = at_rest(few)
    found, grid = measured(hbn(), few, SecureAggregation(), near, what=NORMALISERS)
    plain, _ = measured(hbn(), few, None, near, what=NORMALISERS)
    assert all(np.allclose(found[k], plain[k], rtol=2e-3, atol=1e-5) for k in plain)
    assert len(masked_vectors(grid)) == 3
    inputs, everyone = measured(hbn(), few, SecureAggregation(), near)  # control: as an input one sample counts
    assert len(masked_vectors(everyone)) == 4
    assert not np.allclose(found["5.running_var"], inputs["5.running_var"], rtol=2e-3, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hbn", "static-bn", "fbn", "fedavg"])
def test_a_reference_far_away_is_replaced_until_the_statistics_are_right(name: str, clients: list[Samples]) -> None:
    """torch's 0 and 1 are 400 times this network's variances: measured once, they would be lost in the rounding."""
    method = METHODS[name]()
    secure, plain = (run(method, clients, 1, policy={"calibrate": 3}, secure=s).grid for s in (SecureAggregation(), None))
    found, expected = (next(s["statistics"] for s in grid.train(1) if s) for grid in (secure, plain))
    assert all(np.allclose(found[k], expected[k], rtol=2e-3, atol=1e-5) for k in expected)
    once, _ = measured(method, clients, SecureAggregation(quantization_range=8))
    assert not np.allclose(once["1.running_var"], expected["1.running_var"], rtol=2e-3)  # control


def test_data_far_beyond_the_quantisers_range_are_found(clients: list[Samples], monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a deep network's second pass: thousands of standard deviations from a reference a million times too narrow."""
    network = run(fbn(), clients, 1).grid.train(1)[0]["statistics"]
    start = {k: np.full_like(a, 3.0 if k.endswith("mean") else 1e-6) for k, a in network.items()}
    found, _ = measured(fbn(), clients, SecureAggregation(), start)
    expected, _ = measured(fbn(), clients, None, start)
    names = [k for k in start if "running" in k and k.startswith("1.")]  # the first layer: those above see what it makes of its reference
    assert names
    assert all(np.allclose(found[k], expected[k], rtol=2e-3, atol=1e-4) for k in names)
    monkeypatch.setattr("fl_bn.flower.secagg.rounds._widened", lambda moments, reference, limit: moments)
    cut, _ = measured(fbn(), clients, SecureAggregation(), start)
    assert not all(np.allclose(cut[k], expected[k], rtol=2e-3, atol=1e-4) for k in names)  # control


def vectors_of(clients: list[Samples]) -> list[np.ndarray]:
    """What each client's vector is in a secure exchange: from the plain one's replies."""
    server = strategy(hbn(), clients, None).transport
    _, grid = measured(hbn(), clients, None)
    shapes = layout(server.shared.expected(Phase.MEASURE, "weights"), loss=False)
    reference, weighting = references(server.shared.sections()["statistics"]), Weighting(0, max(SIZES), max(SIZES))
    found = []
    for size, message in zip(SIZES, [m for m in grid.received if m.metadata.message_type == "query.statistics"], strict=True):
        parts, cut = additive({k: to_tensors(v) for k, v in sections(message.content).items()}, {}, reference, 8.0)
        parts = {s: {k: t * weighting.of(s, Plan(size, size, 0)) for k, t in part.items()} for s, part in parts.items()}
        parts |= flags(0.0, 1.0, any(cut.values()), False, 8.0)
        found.append(to_vector(parts, shapes))
    return found


def first_answers(grid: WatchedGrid) -> list[Message]:
    """The replies with masked vectors to the first collection."""
    return [m for m in grid.received if m.has_content() and "fitres.metrics" in m.content.config_records][: len(SIZES)]


def test_no_message_shows_a_client_s_moments(clients: list[Samples], monkeypatch: pytest.MonkeyPatch) -> None:
    secrets = vectors_of(clients)
    _, grid = measured(hbn(), clients, SecureAggregation())
    assert len(first_answers(grid)) == 3
    assert not any(shows(m, secret) for m in grid.received for secret in secrets)
    assert not any(record for m in grid.received if m.has_content() for record in m.content.array_records.values())

    # control 1: in the clear, the spy finds them
    _, plain = measured(hbn(), clients, None)
    replies = [m for m in plain.received if m.metadata.message_type == "query.statistics"]
    for reply in replies:
        mean = sections(reply.content)["moments"]["5.mean"].astype("float64")
        assert shows(reply, mean)
        assert not any(shows(m, mean) for m in grid.received)
    # control 2: without masks, the same protocol shows them
    zeros = lambda seed, num_range, shapes: [np.zeros(shape, dtype=np.int64) for shape in shapes]  # noqa: E731
    monkeypatch.setattr(masks.client_half, "pseudo_rand_gen", zeros)
    monkeypatch.setattr(workflow, "key_stream", zeros)
    unmasked, bare = measured(hbn(), clients, SecureAggregation())
    assert all(shows(answer, secret) for answer, secret in zip(first_answers(bare), secrets, strict=True))
    monkeypatch.undo()
    assert identical(unmasked, measured(hbn(), clients, SecureAggregation())[0])


@pytest.mark.parametrize(("report", "passes"), [("first", [4, 4, 5]), ("all", [6, 8, 10])])
def test_what_is_said_in_the_clear_are_counts(report: str, passes: list[int], clients: list[Samples]) -> None:
    """Passes are samples: of the first batch (of 5 samples a batch of 4 would leave one alone), or of all."""
    method = METHODS["fbn"](report=report)
    ran = run(method, clients, 1, secure=SecureAggregation())
    told = [dict(m.content.config_records["fitres.metrics"]) for m in first_answers(ran.grid)]
    assert all(set(t) == {"activations", "digest"} for t in told)
    plans = [dict(m.content.metric_records["fl-bn/plan"]) for m in ran.grid.received if "fl-bn/plan" in m.content][: len(SIZES)]
    assert [(p["samples"], p["steps"]) for p in plans] == [(c.samples, c.steps) for c in run(method, clients, 1).records[0].clients]
    assert [p["passes"] for p in plans] == passes
    others = {k for m in ran.grid.received if m.has_content() for k in m.content} - {"fl-bn/hello"}
    assert others == {"secaggplus_configs", "fl-bn/plan", "fitres.metrics", "fitres.num_examples", "fitres.status", "fitres.parameters"}


def test_masked_vectors_are_uniform_and_never_the_same_but_their_sum_is(clients: list[Samples]) -> None:
    one, two = (run(METHODS["fedavg"](), clients, 2, secure=SecureAggregation()) for _ in range(2))
    assert identical(one.trajectory[2], two.trajectory[2])
    first, second = masked_vectors(one.grid), masked_vectors(two.grid)
    assert len(first) == len(second) == 6
    for a, b in zip(first, second, strict=True):
        assert np.mean(a == b) < 0.01
        assert kstest(a / 2**32, "uniform").pvalue > 1e-6
        assert abs(np.corrcoef(a, b)[0, 1]) < 0.2
    total = np.sum(first[:3], axis=0) % 2**32
    assert kstest(total / 2**32, "uniform").pvalue > 1e-6  # the sum, too, until the private masks are removed
    quantised = np.rint((np.linspace(-0.1, 0.1, 500) + 8) * 2**22 / 16)
    assert kstest(quantised / 2**32, "uniform").pvalue < 1e-6  # control: numbers without masks are not uniform


@pytest.mark.parametrize("stage", ["setup", "share_keys", "collect_masked_vectors", "unmask"])
def test_a_client_may_be_lost_in_any_stage(stage: str, tiny_clients: Clients) -> None:
    clients = tiny_clients((6, 4, 5, 7, 3))
    near = at_rest(clients)
    secure, _ = measured(hbn(), clients, SecureAggregation(), near, LosingGrid(client_app(hbn(), clients), 5, [(stage, 1)]))

    def raises(client: int, what: str) -> None:
        if client == 1 and what.startswith("measure") and stage != "unmask":  # whoever is lost in unmask is in the sum
            raise OSError("gone")

    expected, _ = measured(hbn(), clients, None, near, WatchedGrid(client_app(hbn(), clients, disturb=raises), 5))
    everyone, _ = measured(hbn(), clients, None, near)
    close = {k: np.allclose(secure[k], expected[k], rtol=1e-3, atol=1e-5) for k in expected}
    assert all(close.values())
    differs = not np.allclose(everyone["1.running_mean"], expected["1.running_mean"], rtol=1e-3, atol=1e-5)
    assert differs == (stage != "unmask")  # control


@pytest.mark.parametrize(
    ("stage", "counted"),
    [("setup", "2 of 4"), ("share_keys", "2 of 4"), ("collect_masked_vectors", "2 of 4"), ("unmask", "2 clients sent shares")],
)
def test_below_the_threshold_nothing_changes_and_nothing_is_asked(
    stage: str, counted: str, tiny_clients: Clients, log: pytest.LogCaptureFixture
) -> None:
    """Nor in a round of training."""
    clients = tiny_clients((6, 4, 5, 7))
    start, _ = measured(hbn(), clients, None)
    lost = [(stage, 0), (stage, 2)]
    grid = LosingGrid(client_app(hbn(), clients), 4, lost)
    after, _ = measured(hbn(), clients, SecureAggregation(), start, grid)
    assert identical(after, start)
    assert counted in log.text
    assert "client 2's statistics are missing" in log.text
    asked = [m for m in grid.sent if "active_nids" in m.content.config_records.get("secaggplus_configs", {})]
    assert bool(asked) == (stage == "unmask")  # no secret's share leaves a client
    assert not any(stage_of(m) for m in grid.received if m.has_content())
    grid = LosingGrid(client_app(FEDAVG, clients), 4, lost)
    ran = run(FEDAVG, clients, 1, grid=grid, secure=SecureAggregation(), policy={"max_failed": 2}, may_fail=True)
    assert not ran.records[0].aggregated
    first = ran.grid.train(1) or run(FEDAVG, clients, 1).grid.train(1)
    assert all(np.array_equal(ran.trajectory[1][k], a) for part in first[:1] for arrays in part.values() for k, a in arrays.items())


def test_masks_that_do_not_cancel_are_noticed(clients: list[Samples], log: pytest.LogCaptureFixture) -> None:
    """A server that makes masks otherwise than the clients gets noise, and must not take it for statistics."""
    start, _ = measured(hbn(), clients, None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workflow, "key_stream", pseudo_rand_gen)
        assert identical(measured(hbn(), clients, SecureAggregation(), start)[0], start)
    assert "the masks did not cancel" in log.text
    assert not identical(measured(hbn(), clients, SecureAggregation(), start)[0], start)  # control


def test_a_pickled_client_makes_the_same_masks(clients: list[Samples]) -> None:
    """Ray pickles an app that is handed over as an object, with the modules that its functions use, by their names."""
    app = cloudpickle.loads(cloudpickle.dumps(client_app(hbn(), clients)))
    there, _ = measured(hbn(), clients, SecureAggregation(), None, WatchedGrid(app, 3))
    assert identical(there, measured(hbn(), clients, SecureAggregation())[0])
