"""Hooks that a loop of one's own calls early, late, twice or not at all: right numbers, or one clear sentence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord
from flwr.serverapp import Grid

from fl_bn.flower import FBN, HBN, FedAvgBN, FedBN, FixBN, OwnAppStrategy, RunFailed
from tests.flower.own_apps import CLIENTS, net, pretrained
from tests.flower.own_loops import OWN, begin, equal, grid, rounds, tensors
from tests.listed import listed


def test_an_evaluation_may_come_first_and_changes_nothing() -> None:
    for name in ("fedbn", "hbn", "fbn"):
        kind, _ = OWN[name]
        strategy, over = kind(net()), grid(name)
        evaluated = over.send_and_receive(strategy.configure_evaluate(0, begin(), ConfigRecord(), over))
        metrics = strategy.aggregate_evaluate(0, evaluated)
        assert metrics is not None
        assert set(metrics) == {"eval_loss", "eval_acc"}
        *_, arrays = rounds(strategy, over, 2)
        assert equal(arrays, kind(net(), fraction_evaluate=0).start(grid(name), begin(), num_rounds=2).arrays)


def test_an_evaluation_before_round_1_is_of_the_arrays_that_it_gets() -> None:
    losses = []
    for model in (net(), pretrained()):
        strategy, over = FedBN(net()), grid("fedbn")
        replies = over.send_and_receive(strategy.configure_evaluate(0, ArrayRecord(model.state_dict()), ConfigRecord(), over))
        metrics = strategy.aggregate_evaluate(0, replies)
        assert metrics is not None
        losses.append(metrics["eval_loss"])
    assert losses[0] != losses[1]


def test_evaluations_between_the_halves_of_a_round_change_nothing() -> None:
    strategy, over, arrays = HBN(net()), grid("hbn"), begin()
    for round in (1, 2, 3):
        messages = strategy.configure_train(round, arrays, ConfigRecord(), over)
        asked = list(strategy.configure_evaluate(round - 1, begin(), ConfigRecord(), over))  # of other arrays
        replies = list(over.send_and_receive(messages))
        assert strategy.aggregate_evaluate(round - 1, over.send_and_receive(asked)) is not None
        arrays = strategy.aggregate_train(round, replies)[0] or arrays
    assert equal(arrays, HBN(net()).start(grid("hbn"), begin(), num_rounds=3).arrays)
    assert [len(record.clients) for record in strategy.round_records] == [CLIENTS] * 3


def test_a_round_that_is_configured_twice_is_trained_once() -> None:
    """Its messages are the same, and a client's answer is that of its state before the round."""
    strategy, over, arrays = FedBN(net(), fraction_evaluate=0), grid("fedbn"), begin()
    for round in (1, 2):
        list(over.send_and_receive(strategy.configure_train(round, arrays, ConfigRecord(), over)))
        replies = over.send_and_receive(strategy.configure_train(round, arrays, ConfigRecord(), over))
        arrays = strategy.aggregate_train(round, replies)[0] or arrays
    assert equal(arrays, FedBN(net(), fraction_evaluate=0).start(grid("fedbn"), begin(), num_rounds=2).arrays)


def test_a_failed_round_may_be_tried_again() -> None:
    strategy, over = FBN(net(), fraction_evaluate=0), grid("fbn")
    messages = list(strategy.configure_train(1, begin(), ConfigRecord(), over))
    list(over.send_and_receive(messages))
    assert strategy.aggregate_train(1, []) == (None, None)
    *_, arrays = rounds(strategy, over, 3)
    assert equal(arrays, FBN(net(), fraction_evaluate=0).start(grid("fbn"), begin(), num_rounds=3).arrays)
    assert [record.aggregated for record in strategy.round_records] == [False, True, True, True]


def test_numbers_may_be_skipped_and_each_round_has_its_number_s_phase() -> None:
    strategy, over, arrays = FixBN(net(), freeze_after=2, fraction_evaluate=0), grid("fixbn"), begin()
    for round in (1, 3, 4):
        arrays = (
            strategy.aggregate_train(round, over.send_and_receive(strategy.configure_train(round, arrays, ConfigRecord(), over)))[0]
            or arrays
        )
    assert [(record.round, record.phase) for record in strategy.round_records] == [(1, "train"), (3, "frozen"), (4, "frozen")]
    after = tensors(arrays)
    *_, one = rounds(FixBN(net(), freeze_after=2, fraction_evaluate=0), grid("fixbn"), 1)
    assert torch.equal(after["1.running_mean"], tensors(one)["1.running_mean"])  # frozen from then on
    assert not torch.equal(after["0.weight"], tensors(one)["0.weight"])


def test_a_loop_may_go_on_at_a_later_round(log: pytest.LogCaptureFixture) -> None:
    """After a checkpoint of one's own, in a new process. FedAvg's clients keep nothing, so the bits are the same."""
    whole, over = FedAvgBN(net(), fraction_evaluate=0), grid("fedavg")
    *_, second, third = rounds(whole, over, 3)
    *_, again = rounds(FedAvgBN(net(), fraction_evaluate=0), grid("fedavg"), 1, second, first=3)
    later, first = tensors(again), tensors(third)
    assert all(torch.equal(tensor, first[name]) for name, tensor in later.items() if not name.endswith("tracked"))
    list(rounds(FBN(net(), fraction_evaluate=0), grid("fbn"), 1, first=3))
    assert "the loop begins with round 3: the statistics are those of its arrays, and are not measured first" in log.text


def test_a_loop_may_go_back_to_arrays_of_an_earlier_round() -> None:
    strategy, over = FedAvgBN(net(), fraction_evaluate=0), grid("fedavg")
    first, second = rounds(strategy, over, 2)
    (third,) = rounds(strategy, over, 1, first, first=3)
    assert not equal(third, second)
    weights = {name: tensor for name, tensor in tensors(third).items() if not name.endswith("tracked")}
    assert all(torch.equal(tensor, tensors(second)[name]) for name, tensor in weights.items())  # the same step from the same arrays


WRONG: dict[str, tuple[Callable[[OwnAppStrategy, Grid, ArrayRecord], Any], str]] = {
    "aggregate before any": (
        lambda s, g, a: FedBN(net()).aggregate_train(1, []),
        r"aggregate_train\(1, ...\) needs configure_train\(...\) before it",
    ),
    "evaluation before any": (
        lambda s, g, a: FedBN(net()).aggregate_evaluate(1, []),
        r"aggregate_evaluate\(1, ...\) needs configure_evaluate",
    ),
    "another round": (
        lambda s, g, a: s.aggregate_train(2, []),
        r"aggregate_train\(2, ...\) needs configure_train\(2, ...\) before it: the last one was of round 1",
    ),
    "twice": (
        lambda s, g, a: s.aggregate_train(1, []),
        r"aggregate_train\(1, ...\) was called before, so round 1 is in the model: go on with 2",
    ),
    "trained already": (
        lambda s, g, a: s.configure_train(1, a, ConfigRecord(), g),
        r"round 1 is in the model already, so number the next one 2",
    ),
    "round 0": (lambda s, g, a: s.configure_train(0, a, ConfigRecord(), g), "rounds are numbered from 1"),
    "an evaluation of another round": (
        lambda s, g, a: s.aggregate_evaluate(1, []),
        r"aggregate_evaluate\(1, ...\) needs configure_evaluate\(1",
    ),
    "arrays of another network": (
        lambda s, g, a: s.configure_train(2, ArrayRecord({"x": torch.ones(2)}), ConfigRecord(), g),
        "arrays of another network",
    ),
    "numbers that are not finite": (
        lambda s, g, a: s.configure_train(
            2, ArrayRecord({**a.to_torch_state_dict(), "0.bias": torch.full((6,), torch.nan)}), ConfigRecord(), g
        ),
        "a hook gave 0.bias with values that are not finite",
    ),
}


@listed("case", WRONG)
def test_calls_that_make_no_sense_are_refused(case: str) -> None:
    call, says = WRONG[case]
    strategy, over = FedAvgBN(net()), grid("fedavg")
    (arrays,) = rounds(strategy, over, 1)
    with pytest.raises(RunFailed, match=says):
        call(strategy, over, arrays)
    assert equal(
        [*rounds(strategy, over, 1, arrays, first=2)][0], FedAvgBN(net()).start(grid("fedavg"), begin(), num_rounds=2).arrays
    )  # it goes on


def test_noise_of_one_s_own_on_a_variance_is_refused_before_any_client_sees_it() -> None:
    strategy, over = FBN(net()), grid("fbn")
    (arrays,) = rounds(strategy, over, 1)
    state = arrays.to_torch_state_dict()
    state["1.running_var"] -= 9.0
    with pytest.raises(
        RunFailed, match=r"a hook gave 1.running_var with a variance below 0 \(-.*\): add noise of your own to weights only"
    ):
        strategy.configure_train(2, ArrayRecord(state), ConfigRecord(), over)
