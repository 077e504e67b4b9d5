"""Statistics under SecAgg+: the same as without it, up to a stated error; the server sees nobody's own; what masks are made of."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Message
from flwr.common.secure_aggregation.secaggplus_utils import pseudo_rand_gen
from scipy.stats import kstest

from fl_bn.bn.moments import Running
from fl_bn.flower.secagg import workflow
from fl_bn.flower.secagg.instructions import SET_UP, instruction_digest
from fl_bn.flower.secagg.masks import bound_to, key_stream
from fl_bn.flower.wire.messages import RECORD_KEY_CONFIGS
from fl_bn.methods import METHODS, fbn, hbn
from fl_bn.secure.additive import average_error, scale
from tests.flower.inside import Clients, Header, Samples, SecureAggregation, to_records
from tests.flower.secure_runs import LosingGrid, masked_vectors, measured
from tests.hostile.liars import people
from tests.in_process import WatchedGrid, client_app, identical, run
from tests.listed import listed

SIZES = (6, 4, 5)
FEDAVG = METHODS["fedavg"]()


def at_rest(clients: list[Samples]) -> dict[str, np.ndarray]:
    """The network with statistics that a further exchange would not change: two layers need two."""
    return measured(hbn(), clients, None, measured(hbn(), clients, None)[0])[0]


def largest_error(clients: list[Samples], bits: int) -> tuple[float, float]:
    """Of a secure exchange about statistics near the data: (largest error of a mean or variance, the same over its bound)."""
    near = at_rest(clients)
    plain, _ = measured(hbn(), clients, None, near)
    found, grid = measured(hbn(), clients, SecureAggregation(quantization_range=bits), near)
    error = average_error(8.0, bits, [size / max(SIZES) for size in SIZES])
    largest, relative = 0.0, 0.0
    for layer in ("1", "5"):
        reference = Running(*(torch.from_numpy(near[f"{layer}.running_{key}"]).double() for key in ("mean", "var")))
        first = (torch.from_numpy(plain[f"{layer}.running_mean"]).double() - reference.mean) / scale(reference)
        bounds = error * scale(reference), error * scale(reference).square() * (8.0 + 2 * first.abs() + error)
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


def test_data_far_beyond_the_quantisers_range_are_found(clients: list[Samples]) -> None:
    """As in a deep network's second pass: thousands of standard deviations from a reference a million times too narrow."""
    network = run(fbn(), clients, 1).grid.train(1)[0]["statistics"]
    start = {k: np.full_like(a, 3.0 if k.endswith("mean") else 1e-6) for k, a in network.items()}
    found, _ = measured(fbn(), clients, SecureAggregation(), start)
    expected, _ = measured(fbn(), clients, None, start)
    names = [k for k in start if "running" in k and k.startswith("1.")]  # the first layer: those above see what it makes of its reference
    assert names
    assert all(np.allclose(found[k], expected[k], rtol=2e-3, atol=1e-4) for k in names)


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


@listed("stage", ["setup", "share_keys", "collect_masked_vectors", "unmask"])
def test_below_the_threshold_nothing_changes_and_nothing_is_asked(stage: str, tiny_clients: Clients) -> None:
    """Nor in a round of training."""
    clients, lost = tiny_clients((6, 4, 5, 7)), [(stage, 0), (stage, 2)]
    start, _ = measured(hbn(), clients, None)
    grid = LosingGrid(client_app(hbn(), clients), 4, lost)
    assert identical(measured(hbn(), clients, SecureAggregation(), start, grid)[0], start)
    asked = [m for m in grid.sent if "active_nids" in m.content.config_records.get("secaggplus_configs", {})]
    assert bool(asked) == (stage == "unmask")  # no secret's share leaves a client
    grid = LosingGrid(client_app(FEDAVG, clients), 4, lost)
    ran = run(FEDAVG, clients, 1, grid=grid, secure=SecureAggregation(), policy={"max_failed": 2}, may_fail=True)
    assert not ran.records[0].aggregated


def test_masks_that_do_not_cancel_are_noticed(clients: list[Samples], log: pytest.LogCaptureFixture) -> None:
    """A server that makes masks otherwise than the clients gets noise, and must not take it for statistics."""
    start, _ = measured(hbn(), clients, None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workflow, "key_stream", pseudo_rand_gen)
        assert identical(measured(hbn(), clients, SecureAggregation(), start)[0], start)
    assert "the masks did not cancel" in log.text
    assert not identical(measured(hbn(), clients, SecureAggregation(), start)[0], start)  # control


def test_masks_use_the_whole_seed() -> None:
    """Flower's generator folds a seed into 32 bits: two with the same XOR of their words are one to it."""
    one, two = bytes(range(32)), bytes(range(4, 8)) + bytes(range(4)) + bytes(range(8, 32))
    with bound_to(bytes(32)):
        first, again, other = (key_stream(seed, 2**32, [(1000,)])[0] for seed in (one, one, two))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)
    assert np.array_equal(*(pseudo_rand_gen(seed, 2**32, [(1000,)])[0] for seed in (one, two)))  # control


def test_masks_are_bound_to_the_instruction() -> None:
    with pytest.raises(LookupError):
        key_stream(b"seed", 2**32, [(1000,)])
    masks = []
    for digest in (bytes(32), bytes(31) + b"1"):
        with bound_to(digest):
            masks += key_stream(b"seed", 2**32, [(1000,)])
    assert (masks[0] == masks[1]).mean() < 0.01


# What the keys of masks depend on: all of an instruction, and nothing that honest servers set for one client

HEADER = Header("fbn", "train", 1, "signature")
CONFIG = {"learning-rate": 0.1, "secagg-update-weight": 6, "dp-clip": 1.0, "counted": 3, "version": "1", "other": [1, 2]}
RUN = {"local-steps": 2, "method": "fbn"}
WEIGHTS = {"a.weight": np.ones((2, 3), "f4"), "b.weight": np.zeros(2, "f4")}


def state(**fields: Any) -> SimpleNamespace:
    values = dict.fromkeys(SET_UP, 5) | {"clipping_range": 8.0, "cohort": [1, 2, 3]}
    return SimpleNamespace(**values | fields)


def digest(header: Header = HEADER, config: Any = CONFIG, arrays: Any = None, run_config: Any = RUN, **set_up: Any) -> bytes:
    content = to_records({"weights": WEIGHTS} if arrays is None else arrays, header)
    content["fl-bn/config"] = ConfigRecord(dict(config))
    content[RECORD_KEY_CONFIGS] = ConfigRecord({"srcs": [1, 2], "ctxts": [b"a", b"b"]})
    return instruction_digest(Message(content, 1, "train"), run_config, state(**set_up))


OTHERS = {
    **{f"set-up {name}": {name: [1, 2, 4] if name == "cohort" else 6} for name in SET_UP},
    **{f"header {name}": {"header": Header(**{**vars(HEADER), name: 2 if name == "round" else "x"})} for name in vars(HEADER)},
    **{f"config {name}": {"config": {**CONFIG, name: 0}} for name in CONFIG if name != "counted"},
    "a field more": {"config": {**CONFIG, "more": 1}},
    "a field less": {"config": {"counted": 3}},
    "a number of another type": {"config": {**CONFIG, "dp-clip": 1}},
    "a text for bytes": {"config": {**CONFIG, "other": "00"}},
    "the run config": {"run_config": {**RUN, "local-steps": 0}},
    "one bit of an array": {"arrays": {"weights": {**WEIGHTS, "b.weight": np.array([0, 1e-45], "f4")}}},
    "another shape": {"arrays": {"weights": {**WEIGHTS, "a.weight": np.ones((3, 2), "f4")}}},
    "another type": {"arrays": {"weights": {**WEIGHTS, "b.weight": np.zeros(2, "i4")}}},
    "another name": {"arrays": {"weights": {"a.weight": WEIGHTS["a.weight"], "c.weight": WEIGHTS["b.weight"]}}},
    "another section": {"arrays": {"statistics": WEIGHTS}},
    "a section more": {"arrays": {"weights": WEIGHTS, "reference": WEIGHTS}},
    "an array less": {"arrays": {"weights": {"a.weight": WEIGHTS["a.weight"]}}},
}


def test_whatever_is_told_otherwise_changes_it() -> None:
    """The order of names and what is told to one client alone change nothing. Bytes are no text."""
    digests = {case: digest(**changed) for case, changed in {"honest": {}, **OTHERS}.items()}
    assert {case: one for case, one in digests.items() if [*digests.values()].count(one) > 1} == {}
    assert digest(arrays={"weights": dict(reversed(WEIGHTS.items()))}, config=dict(reversed(CONFIG.items()))) == digest()
    assert digest(config={**CONFIG, "counted": 9}) == digest()
    assert digest(config={"x": b"\0"}) != digest(config={"x": "00"})


@pytest.mark.parametrize("name", ["fedbn", "hbn", "fixbn"])
def test_an_honest_server_tells_all_clients_of_a_sum_the_same(name: str) -> None:
    ran = run(METHODS[name](), people(4), 2, secure=SecureAggregation(), policy={"fraction": 0.75, "min_cohort": 3, "calibrate": 1})
    assert all(record.aggregated for record in ran.records)
    digests = [str(m.content.config_records["fitres.metrics"]["digest"]) for m in ran.grid.received if "fitres.metrics" in m.content]
    assert set(Counter(digests).values()) <= {3, 4}  # three of four clients train, and all may be measured
