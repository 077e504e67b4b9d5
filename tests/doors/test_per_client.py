"""Values of each client's own: task, loss, metrics, optimiser, scheduler, test batches; in every engine."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.optim import SGD, Adam

from fl_bn import Classification, Federation, Regression, SeededBatches, methods, per_client
from tests.doors.inner import evaluate
from tests.doors.test_federation import made, net
from tests.listed import listed

CLIENTS = [SeededBatches(*made(client, 24), 8) for client in range(3)]
TESTS = [[made(7, 10)], [made(8, 40)], [made(9, 22)]]
SLOW, FAST = partial(SGD, lr=0.01), partial(SGD, lr=0.3)


class Halved(Classification):
    def loss(self, output: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(output, targets) / 2


def federation(method: str = "fedavg", **options: Any) -> Federation:
    return Federation(net(), methods.METHODS[method](), options.pop("clients", CLIENTS), **options)


def weights(fed: Federation, rounds: int = 2) -> Tensor:
    for _ in fed.run(rounds):
        pass
    return torch.cat([tensor.flatten().double() for tensor in fed.model.state_dict().values()])


ENGINES: dict[str, dict[str, Any]] = {"sequential": {}, "workers": {"workers": 2}, "vectorised": {"engine": "vectorised"}}


@pytest.mark.sample("[sequential", "[vectorised")
@pytest.mark.parametrize("engine", ENGINES)
def test_each_client_has_its_own_optimiser(engine: str, log: pytest.LogCaptureFixture) -> None:
    """Where all trains alone (``single``), each client has the bits of a federation in which all have its optimiser."""
    mixed = federation("single", optimizer=[SLOW, FAST, SLOW], **ENGINES[engine])
    weights(mixed)
    slow, fast = (federation("single", optimizer=make) for make in (SLOW, FAST))
    weights(slow)
    weights(fast)

    def alike(client: int, other: Federation) -> bool:
        mine, theirs = mixed.client_model(client).state_dict(), other.client_model(client).state_dict()
        return all(torch.equal(tensor, theirs[name]) for name, tensor in mine.items())

    assert [alike(0, slow), alike(1, fast), alike(2, slow)] == [True] * 3
    assert [alike(0, fast), alike(1, slow)] == [False] * 2  # control
    assert log.text.count("computed one by one") == (engine == "vectorised")  # one line, and why


def test_a_sequence_a_function_and_a_single_value_of_the_same_meaning_have_the_same_bits() -> None:
    single = weights(federation(optimizer=FAST))
    for several in ([FAST] * 3, per_client([FAST] * 3), per_client(lambda client: FAST)):
        assert torch.equal(weights(federation(optimizer=several)), single)


def test_each_client_has_its_own_loss_and_task() -> None:
    def half(output: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(output, targets) / 2

    tasks = weights(federation(task=[Halved(), Classification(), Halved()]))
    assert torch.equal(weights(federation(loss=[half, None, half])), tasks)
    assert torch.equal(weights(federation(loss=per_client(lambda client: None if client == 1 else half))), tasks)
    assert not torch.equal(weights(federation(loss=half)), tasks)  # control


def test_methods_whose_path_is_bounded_take_each_client_s_own_rate() -> None:
    """FBN clips by the rate of each client: as in a federation where all have that rate."""
    assert torch.equal(weights(federation("fbn", optimizer=[FAST] * 3)), weights(federation("fbn", optimizer=FAST)))
    mixed = federation("fbn", optimizer=[SLOW, FAST, SLOW])
    rates = [own.rate_share * mixed.server.policy.rate(1, 1) for own in mixed._transport.clients.own]
    assert rates == pytest.approx([0.01, 0.3, 0.01])
    assert {own.settings.clip for own in federation("fbn", optimizer=[SLOW, Adam, SLOW])._transport.clients.own} == {"none"}


@listed("method", ["fedavg", "fedbn"])
def test_test_batches_of_their_own_count_by_their_samples(method: str) -> None:
    """A client without test samples counts in no mean."""
    fed = federation(method, test=per_client(TESTS))
    (record,) = fed.run(1)
    own = [evaluate(fed.client_model(i), test).result() for i, test in enumerate(TESTS)]
    weighted = sum(n * metrics["accuracy"] for n, metrics in zip((10, 40, 22), own, strict=True)) / 72
    assert record.evaluation["accuracy"] == pytest.approx(weighted)
    assert record.evaluation["accuracy"] != pytest.approx(sum(metrics["accuracy"] for metrics in own) / 3)  # control
    assert [record.client_evaluation[i]["accuracy"] for i in range(3)] == [metrics["accuracy"] for metrics in own]
    assert fed.evaluate(per_client(TESTS)) == pytest.approx(record.evaluation, nan_ok=True)
    assert fed.evaluate(TESTS[0]) == pytest.approx(evaluate(fed.model, TESTS[0]).result(), nan_ok=True) or method == "fedbn"
    some = federation(method, test=per_client([*TESTS[:2], []]))
    (record,) = some.run(1)
    first, second = (record.client_evaluation[client]["loss"] for client in record.client_evaluation)
    assert record.evaluation["loss"] == pytest.approx((10 * first + 40 * second) / 50)


def test_clients_of_several_tasks_have_the_metrics_of_each() -> None:
    values = SeededBatches(made(1, 24)[0], torch.randn(24, 3, generator=torch.Generator().manual_seed(5)), 8)
    tests: Sequence[Any] = [TESTS[0], [(made(8, 40)[0], torch.randn(40, 3))], TESTS[2]]
    tasks = [Classification(), Regression(), Classification()]
    fed = federation(clients=[CLIENTS[0], values, CLIENTS[2]], task=tasks, test=per_client(tests))
    (record,) = fed.run(1)
    assert {"accuracy", "r2", "loss"} <= set(record.evaluation)
    assert record.evaluation["r2"] == record.client_evaluation[1]["r2"]
    first, last = record.client_evaluation[0]["accuracy"], record.client_evaluation[2]["accuracy"]
    assert record.evaluation["accuracy"] == pytest.approx((10 * first + 22 * last) / 32)
