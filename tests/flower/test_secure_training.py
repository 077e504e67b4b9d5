"""Training rounds through one secure sum: the same run as without it, up to rounding; and privacy on top."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Message, RecordDict

from fl_bn.flower import BatchNormStrategy, Rounds
from fl_bn.flower.secagg.client import _private, noise_refusals
from fl_bn.flower.wire.messages import RECORD_KEY_CONFIGS
from fl_bn.methods import METHODS, Method, Role
from fl_bn.secure.privacy import Privacy, epsilon
from tests.flower.inside import Clients, Defence, LocalTraining, Samples, SecureAggregation
from tests.flower.secure_runs import masked_vectors
from tests.in_process import Run, run
from tests.listed import common_first, listed
from tests.networks import seeded_network
from tests.refusals import naming

DSGD = LocalTraining(batch_size=64, steps=1, momentum=0.9, update="gradients")
EPOCHS = LocalTraining(batch_size=4, epochs=2)
STEPS = LocalTraining(batch_size=4, steps=3)  # small clients use samples again: statistics and updates have other weights


def off(a: Run, b: Run, round: int) -> float:
    """Largest difference of any shared number after ``round``."""
    x, y = a.trajectory[round], b.trajectory[round]
    assert x.keys() == y.keys()
    return max(float(np.abs(x[k].astype("float64") - y[k]).max()) for k in x)


SECURE = [name for name in METHODS if METHODS[name]().shares(Role.WEIGHT) and not METHODS[name]().exchanges]


@pytest.mark.sample("[hbn]", "[fedbn]")
@pytest.mark.parametrize("name", common_first(SECURE))
def test_a_secure_run_is_the_plain_one_up_to_rounding(name: str, clients: list[Samples]) -> None:
    """Calibrated, so that the first round's reference is near; 24 bits for three clients. What a client keeps survives, its keys do not."""
    method, policy = METHODS[name](), {"calibrate": 2, "evaluate_every": 2}
    plain, secure, coarse = (
        run(method, clients, 2, policy=policy, secure=SecureAggregation(quantization_range=bits) if bits else None) for bits in (0, 24, 8)
    )
    assert off(plain, secure, 2) < 3e-3
    assert off(plain, secure, 2) < off(plain, coarse, 2) / 10  # control
    for a, b in zip(plain.records, secure.records, strict=True):
        assert b.aggregated
        assert b.loss == pytest.approx(a.loss, rel=1e-3)
        assert [(c.client, c.samples, c.steps) for c in b.clients] == [(c.client, c.samples, c.steps) for c in a.clients]
        assert {c.loss for c in b.clients} == {b.clients[0].loss}  # each client's own is not known
        assert set(b.bytes_up) == {"masked"}
    for one, other in zip(plain.grid.states(), secure.grid.states(), strict=True):
        assert set(other) - set(one) <= {"fl-bn/told", "fl-bn/previous/told"}
        for key, array in one.array_records.get("fl-bn/local", {}).items():
            assert np.allclose(other.array_records["fl-bn/local"][key].numpy(), array.numpy(), atol=3e-3)
    told = [m.content.config_records["fitres.metrics"] for m in secure.grid.received if "fitres.metrics" in m.content]
    assert told
    assert not any("kept" in one for one in told)  # where tensors overflowed, that round would tell of the data


ALGORITHM_2 = METHODS["fbn"](momentum=0.1, report="all")


@pytest.mark.sample("settings0")
@pytest.mark.parametrize(("settings", "weights"), [(DSGD, "samples"), (STEPS, "samples"), (EPOCHS, "uniform")])
def test_gradients_epochs_and_uniform_weights(settings: LocalTraining, weights: str, clients: list[Samples]) -> None:
    model = seeded_network("plain")
    policy = {"calibrate": 2, "rate": lambda round, rounds: 0.01}  # at 0.1 the variances grow by more than the quantiser's 64 times
    options = {"settings": settings, "model": model, "policy": policy | {"client_weights": weights}}
    plain, secure = (run(ALGORITHM_2, clients, 2, secure=s, **options) for s in (None, SecureAggregation(quantization_range=24)))  # type: ignore[arg-type]
    assert off(plain, secure, 2) < 1e-4
    other = run(ALGORITHM_2, clients, 2, settings=settings, model=model, policy=policy | {"client_weights": "uniform"})
    assert (off(other, secure, 2) < 1e-4) == (weights == "uniform")  # control


def test_a_client_too_small_to_train_is_left_out_before_keys_are_shared(tiny_clients: Clients) -> None:
    few = tiny_clients((6, 1, 5, 7))
    plain, secure = (run(METHODS["fedavg"](), few, 1, secure=s) for s in (None, SecureAggregation(quantization_range=24)))
    assert [c.client for c in secure.records[0].clients if c.refused] == [1]
    assert off(plain, secure, 1) < 1e-4


def test_diverged_training_sends_nothing(clients: list[Samples], log: pytest.LogCaptureFixture) -> None:
    explode = {"rate": lambda round, rounds: 1e30}
    ran = run(METHODS["gn"](), clients, 1, policy=explode, secure=SecureAggregation(), may_fail=True)
    assert "not all values are finite" in log.text
    assert not masked_vectors(ran.grid)
    assert not ran.records[0].aggregated


@listed(
    ("change", "said"),
    [
        ({"clients": 10, "fraction": 0.2}, "3 clients in a sum, but got 2"),
        ({"defence": Defence(1, "median", "median")}, "defence"),
        ({"method": METHODS["fedtan"]()}, "layer by layer"),
        ({"clients": 64, "secure": SecureAggregation(quantization_range=26)}, "quantization_range=25"),
        ({"clients": 4, "secure": SecureAggregation(threshold=2)}, "4 shares"),
        ({"secure": SecureAggregation(privacy=Privacy(1, 1, 1))}, "client-weights"),
        ({"secure": SecureAggregation(privacy=Privacy(1, 1, 9))}, "secagg-clipping-range: set that to 20.8"),
    ],
)
def test_what_cannot_work_is_refused_before_the_run(change: dict[str, Any], said: str) -> None:
    usual = {"method": METHODS["fbn"](), "clients": 5, "fraction": 1.0, "defence": Defence(), "secure": SecureAggregation()}

    def strategy(method: Method, clients: int, fraction: float, **options: Any) -> BatchNormStrategy:
        return BatchNormStrategy(seeded_network("cnn"), method, Rounds(clients=clients, fraction=fraction), **options)

    with pytest.raises(ValueError, match=said):
        strategy(**usual | change)
    strategy(**usual)  # control


@listed(
    "settings",
    [{"shares": 4}, {"shares": 1}, {"shares": 5, "threshold": 2}, {"threshold": -1}, {"clipping_range": 0.0}, {"quantization_range": 31}],
)
def test_settings_that_hide_nothing_or_overflow_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="|".join(settings)):
        SecureAggregation(**settings)


def test_with_fewer_shares_than_clients_a_client_is_masked_against_its_neighbours(tiny_clients: Clients) -> None:
    clients = tiny_clients((6, 4, 5, 7, 3, 4))
    plain, secure = (run(METHODS["gn"](), clients, 1, secure=s) for s in (None, SecureAggregation(shares=3, threshold=3)))
    assert off(plain, secure, 1) < 1e-4
    assert len(masked_vectors(secure.grid)) == 6


PRIVACY = Privacy(clip=0.5, statistics_clip=1.0, noise=0.01)
NOISE = {"dp-noise": 1.0, "dp-clip": 1.0, "dp-statistics-clip": 2.0}
UNIFORM = {"client_weights": "uniform", "calibrate": 2}


@pytest.mark.parametrize(
    ("method", "releases"),
    [
        ("gn", 1),  # the updates alone
        ("fbn", 4),  # two calibrations, of statistics alone; updates and statistics
        ("hbn", 5),  # and an exchange before the evaluation
        ("static-bn", 5),  # statistics before the evaluation alone, an exchange per layer
    ],
)
def test_what_counts_as_a_release(method: str, releases: int, clients: list[Samples], log: pytest.LogCaptureFixture) -> None:
    run(METHODS[method](), clients, 1, policy=UNIFORM, secure=SecureAggregation(privacy=PRIVACY))
    *_, said = (line for line in log.messages if "epsilon" in line)
    assert f"epsilon {epsilon(releases, 0.01, 1e-5):.3g} at delta 1e-05" in said


@pytest.mark.parametrize("privacy", [None, PRIVACY], ids=["exact", "noisy"])
def test_noise_moves_no_weight_that_is_frozen(privacy: Privacy | None, clients: list[Samples]) -> None:
    """Neither one that the model's owner froze, nor the scale after FixBN's freeze."""
    model, method = seeded_network("cnn"), METHODS["fixbn"](freeze_after=1, freeze_what="both")
    first, scale = "0.weight", "1.weight"
    model[0].weight.requires_grad_(False)
    ran = run(method, clients, 2, model=model, policy={"client_weights": "uniform"}, secure=SecureAggregation(privacy=privacy))
    assert np.array_equal(ran.trajectory[2][first], model[0].weight.numpy())
    assert np.array_equal(ran.trajectory[1][scale], ran.trajectory[2][scale])
    assert not np.array_equal(ran.trajectory[1][scale], model[1].weight.detach().numpy())  # control: before the freeze it moves
    assert not np.array_equal(ran.trajectory[1]["4.weight"], ran.trajectory[2]["4.weight"])


def test_clips_of_update_and_statistics_are_two(clients: list[Samples]) -> None:
    """Nearly without noise: the mean update is no longer than its clip, and the statistics move only as far as theirs lets them."""
    still = replace(PRIVACY, noise=1e-9)

    def moved(privacy: Privacy) -> tuple[float, float]:
        ran = run(ALGORITHM_2, clients, 1, policy={"client_weights": "uniform"}, secure=SecureAggregation(privacy=privacy))
        before, after = next(s for s in ran.grid.train(1) if s), ran.trajectory[1]
        lengths = [
            np.sqrt(sum(float(np.square(after[k].astype("float64") - a).sum()) for k, a in before[section].items()))
            for section in ("weights", "statistics")
        ]
        return lengths[0], lengths[1]

    tight, loose = moved(replace(still, clip=1e-3)), moved(replace(still, clip=1e3, statistics_clip=1e3))
    assert tight[0] <= 1e-3 * 1.05
    assert loose[0] > 1e-2  # control: without a clip it is longer
    assert tight[1] > 0.05
    frozen = moved(replace(still, clip=1e3, statistics_clip=1e-3))
    assert frozen[1] < 1e-2 < loose[1]
    assert frozen[0] == pytest.approx(loose[0], rel=1e-2)
    noisy = moved(replace(still, clip=1e3, statistics_clip=1e-3, noise=1e-3))  # of each, in proportion to its own clip
    assert noisy[1] < 1e-2 < noisy[0]


def test_noise_that_the_quantiser_would_cut_off_is_refused_by_the_client() -> None:
    parts, config = {"weights": {"fc.weight": torch.zeros(3)}}, {"dp-noise": 6.0, "dp-clip": 1.0, "dp-statistics-clip": 9.0}
    assert _private(parts, config, 9, 8.0)["weights"]["fc.weight"].abs().max() > 0  # there are no statistics to need their noise
    with naming("cut off"):
        _private(parts, config, 8, 8.0)


def test_a_loss_that_does_not_fit_is_not_known(clients: list[Samples], log: pytest.LogCaptureFixture) -> None:
    model = seeded_network("cnn")
    torch.nn.init.normal_(model[-1].weight, std=1e4)
    rules = {"evaluate_every": 1, "rate": lambda round, rounds: 1e-9}
    one, other = (run(METHODS["fedbn"](), clients, 1, model=m, policy=rules, secure=SecureAggregation()) for m in (model, None))
    assert [np.isnan(ran.records[0].evaluation["loss"]) for ran in (one, other)] == [True, False]
    assert not np.isnan(one.records[0].evaluation["accuracy"])
    assert sum("the mean loss is not known" in line for line in log.messages) == 2  # of training and of evaluation


@listed(("told", "refused"), [(NOISE, False), ({}, True), ({**NOISE, "dp-noise": 0.5}, True), ({**NOISE, "secagg-of": "evaluation"}, True)])
def test_noise_is_that_of_the_run_config_whatever_the_server_asks_for(told: dict[str, Any], refused: bool) -> None:
    message = Message(RecordDict({"fl-bn/config": ConfigRecord(told), RECORD_KEY_CONFIGS: ConfigRecord({})}), 1, "train")
    said, control = [*noise_refusals(message, {**NOISE, "rounds": 3})], [*noise_refusals(message, {"dp-noise": 0.0})]
    assert (bool(said), control) == (refused, [])
