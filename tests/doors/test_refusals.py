"""What users give to a federation or to a loop of their own by mistake: refused in one sentence that names it, and its like is taken."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import LBFGS, SGD, AdamW
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, TensorDataset

from fl_bn import Classification, EarlyStop, Federation, SeededBatches, convert, local_round, methods, per_client, server_state
from fl_bn.methods import METHODS, Method
from fl_bn.objectives import Scaffold
from tests.doors.inner import Defence
from tests.doors.test_federation import made, net
from tests.listed import listed
from tests.refusals import naming

Give = Callable[[], Any]
FEDAVG = methods.fedavg()


def batches(seed: int = 1) -> list[tuple[Tensor, Tensor]]:
    return [made(seed, 8)]


def fed(method: Any = FEDAVG, model: Any = None, clients: Any = None, **named: Any) -> Federation:
    given = [batches(seed=i) for i in range(3)] if clients is None else clients
    return Federation(model or net(), method, given, **{"workers": 1, **named})


def run(method: Any = FEDAVG, rounds: Any = 1, **named: Any) -> list[Any]:
    return list(fed(method, **named).run(rounds))


def cases(table: dict[str, tuple[Any, ...]]) -> list[Any]:
    return [pytest.param(*case, id=name) for name, case in table.items()]


def loader(**options: Any) -> DataLoader[tuple[Tensor, ...]]:
    return DataLoader(TensorDataset(*batches()[0]), batch_size=4, **options)


def once() -> Iterator[Any]:
    return (batch for batch in batches())


def of_others(parameters: Any) -> SGD:
    return SGD(net().parameters(), lr=0.1)


SCAFFOLD = {"objective": Scaffold(), "optimizer": partial(SGD, lr=0.1)}
OTHER, TESTS = nn.Parameter(torch.ones(())), [batches(seed=i) for i in (7, 8, 9)]
ARGUMENTS: dict[str, tuple[dict[str, Any], str]] = {
    "optimizer of other parameters": ({"optimizer": of_others}, "SGD"),
    "optimizer of one parameter more": ({"optimizer": lambda p: SGD([*p, nn.Parameter(torch.zeros(1))], lr=0.1)}, "1 of the 7"),
    "optimizer that is made already": ({"optimizer": [SGD, of_others(None), SGD]}, "client 1"),
    "optimizer for too few": ({"optimizer": [SGD, SGD]}, "optimizer"),
    "loss that is a number": ({"loss": 3}, "loss"),
    "task that is a class": ({"task": Classification}, "task"),
    "task of a bare function": ({"task": lambda client: Classification()}, "per_client"),
    "metric that is a function": ({"metrics": {"auc": max}}, "'auc'"),
    "metric of a name that is taken": ({"metrics": {"accuracy": max}}, "'accuracy'"),
    "clients as one loader": ({"clients": loader()}, "clients"),
    "clients from a generator": ({"clients": (batches() for _ in range(3))}, "list(clients)"),
    "clients by name": ({"clients": {"a": batches()}}, "list(clients.values())"),
    "no clients": ({"clients": []}, "client"),
    "client that is a batch": ({"clients": batches()}, "client 0"),
    "client that is a list of loaders": ({"clients": [[loader()]]}, "client 0"),
    "client that is a dataset of samples": ({"clients": [loader().dataset]}, "client 0"),
    "client that can be read once": ({"clients": [batches(), once()]}, "client 1"),
    "test that can be read once": ({"test": once()}, "test"),
    "test for too few": ({"test": per_client(TESTS[:2])}, "test"),
    "callbacks of a class": ({"callbacks": [EarlyStop]}, "callbacks"),
    "local_epochs in a text": ({"local_epochs": "2"}, "local_epochs"),
    "workers of one program": ({"workers": 2, "engine": "vectorised"}, "workers"),
    "method by name": ({"method": "fbn"}, "method"),
    "server_optimizer by name": ({"server_optimizer": "fedadam"}, "server_optimizer"),
    "model that is a function": ({"model": print}, "model"),
    "model with a lazy layer": ({"model": nn.Sequential(nn.LazyLinear(2))}, "LazyLinear"),
    "model with nothing to train": ({"model": net().requires_grad_(False)}, "requires_grad"),
    "objective that FedTAN cannot follow": ({"method": methods.fedtan(), "objective": Scaffold()}, "objective"),
    "objective that no rule guards": ({"objective": Scaffold(), "defence": Defence(1, "median", "median")}, "robust"),
    "defence against more than there are": ({"defence": Defence(2, "median", "median")}, "median"),
    "objective of plain SGD, with AdamW": ({"objective": Scaffold(), "optimizer": partial(AdamW, lr=0.1)}, "SGD"),
}


@listed("options, key", cases(ARGUMENTS))
def test_an_argument_of_federation_is_refused_before_round_1(options: dict[str, Any], key: str) -> None:
    with naming(key) as caught:
        fed(**options)
    assert "\n" not in str(caught.value)


def without_gradients() -> None:
    with torch.no_grad():
        run()


class Wrong:
    """Batches of which the network can make nothing."""

    def __iter__(self) -> Iterator[Any]:
        yield batches()[0][0].double(), batches()[0][1]


RUNS: dict[str, tuple[Give, str]] = {
    "optimizer that needs a closure": (lambda: run(optimizer=LBFGS), "closure"),
    "scheduler that needs a metric": (lambda: run(scheduler=ReduceLROnPlateau), "metrics"),
    **{f"{rounds!r} rounds": (lambda rounds=rounds: run(rounds=rounds), "rounds") for rounds in (1.5, "2", -1)},
    "0 rounds where nothing is measured": (lambda: run(rounds=0), "0 rounds only measures"),
    **{f"a schedule of {factor!r}": (lambda factor=factor: run(schedule=lambda *_: factor), "schedule") for factor in (-1.0, None)},
    "a loss that is a number": (lambda: run(loss=lambda output, y: 0.5), "0.5"),
    "a loss of each sample": (lambda: run(loss=lambda output, y: output.sum(1)), "(8,)"),
    "a loss of other parameters": (
        lambda: run(loss=lambda output, y: nn.Parameter(torch.ones(())) * output.detach().sum()),
        "no parameter",
    ),
    "no test batch": (lambda: run(test=[]), "test"),
    "no gradients": (without_gradients, "no_grad"),
    "loaders with workers, in workers": (lambda: run(clients=[loader(num_workers=2)] * 2, workers=2), "num_workers=2"),
    "single samples": (lambda: fed().evaluate([(torch.randn(6), 1), (torch.randn(6), 0)]), "client 0"),
    "test batches of each client from an iterator": (lambda: fed(methods.fedbn()).evaluate(once()), "iterated over again"),
    **{f"the network of client {one!r}": (lambda one=one: trained().client_model(one), repr(one)) for one in (3, -1, "0")},
    "fewer targets than inputs": (lambda: SeededBatches(torch.zeros(8, 4), torch.zeros(5), 4), "(5,)"),
    "a batch size of a float": (lambda: SeededBatches(torch.zeros(8, 4), torch.zeros(8), 4.0), "batch_size"),
    "a defence against half an attacker": (lambda: Defence(1.5, "median", "median"), "f"),  # type: ignore[arg-type]
    "a defence without a rule": (lambda: Defence(1, None), "None"),  # type: ignore[arg-type]
    "a state for an instruction": (lambda: local_round(net(), FEDAVG, server_state(net(), FEDAVG, 2)).__enter__(), "instruction"),  # type: ignore[arg-type]
    "a method by its function": (lambda: server_state(net(), methods.fbn, 2), "method"),  # type: ignore[arg-type]
    "a table of bytes": (lambda: SeededBatches(torch.zeros(8, 5, dtype=torch.uint8), torch.zeros(8), 4), "uint8"),
}


def trained() -> Federation:
    done = fed(methods.fedbn())
    list(done.run(1))
    return done


@listed("give, key", cases(RUNS))
def test_what_a_run_cannot_use_is_refused(give: Give, key: str) -> None:
    with naming(key, Exception):
        give()


def test_control_its_like_is_taken() -> None:
    for method, objective in ((methods.fbn(), {}), (methods.hbn(), {}), (methods.fixbn(0), {}), (FEDAVG, SCAFFOLD)):
        assert [one.aggregated for one in run(method, rounds=2, schedule=lambda round, rounds: round - 1.0, **objective)] == [True, True]
    assert run(optimizer=lambda parameters: SGD([*parameters][:2], lr=0.1), scheduler=lambda optimizer: None)[0].aggregated
    with torch.no_grad():
        assert run(methods.fbn(), 0) == []  # measuring needs no gradients
    done = trained()
    assert not torch.equal(done.client_model(0)[1].weight, done.client_model(np.int64(2))[1].weight)
    assert fed(test=batches()).evaluate(once()) == fed(test=batches()).evaluate(batches())  # once is enough for one network
    assert next(iter(SeededBatches(torch.zeros(4, 1, 2, 2, dtype=torch.uint8), torch.zeros(4), 4)))[0].max() == -1  # an image
    assert next(iter(SeededBatches(torch.ones(4, 5, dtype=torch.int32), torch.zeros(4), 4)))[0].dtype is torch.int32  # indices of words


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_an_error_of_a_client_names_it_and_its_round(workers: int) -> None:
    with pytest.raises(RuntimeError) as caught:
        run(clients=[batches(), Wrong()], workers=workers)
    assert caught.value.__notes__[0] == "at client 1, in round 1. Its loader: Wrong"
    assert len(caught.value.__notes__) == workers  # the trace in the other process


def test_a_loss_that_uses_the_given_network_is_refused_by_its_gradients() -> None:
    model, other = net(), net()
    with naming("gradients"):
        run(model=model, loss=lambda output, y: F.cross_entropy(output, y) + model[0].weight.abs().sum())
    run(model=model, loss=lambda output, y: F.cross_entropy(output, y) + other[0].weight.abs().sum())  # control: a teacher's, say


# Loops of one's own


def entered(method: Method, model: nn.Module) -> None:
    with local_round(model, method, server_state(net(), method, rounds=2).instruction()):
        pass


def a_round(method: Method = FEDAVG, train: Any = None) -> None:
    """Train ``train``, or the network of the round."""
    model = convert(net(), method)
    with local_round(model, method, server_state(net(), method, rounds=2).instruction()) as round:
        if method.report.name == "PASS":
            round.measure(batches())
        trains = train or model
        F.cross_entropy(trains(batches()[0][0]), batches()[0][1]).backward()
        SGD(trains.parameters(), lr=0.1).step()
    round.reply(8)


def rated(wrong: Any, at: int = 1) -> Any:
    return server_state(net(), FEDAVG, rounds=3, rate=lambda round, rounds: wrong if round == at else 0.1)


REPLACES = [name for name, make in METHODS.items() if make().layer and make().has_statistics and not make().local_in]
LOOPS: dict[str, tuple[Give, str]] = {
    **{f"{n!r} rounds": (lambda n=n: server_state(net(), FEDAVG, rounds=n), "rounds") for n in (0, 2.0, True)},
    **{f"rate of {r!r}": (lambda r=r: rated(r), "rate") for r in (None, "0.1", -0.1, float("nan"))},
    "rate of the last round": (lambda: rated(None, 3), "round 3 of 3"),
    "model with nothing to train": (lambda: server_state(net().requires_grad_(False), FEDAVG, 1).instruction(), "requires_grad"),
    **{f"model not converted for {n}": (lambda n=n: entered(METHODS[n](), net()), f"method {n}") for n in REPLACES},
    "model of another method": (lambda: entered(FEDAVG, convert(net(), methods.fbn())), "FederatedBatchNorm"),
    **{f"no step, {n}": (lambda n=n: a_round(METHODS[n](), net()), "round.model") for n in ("fedavg", "fbn", "hbn")},
}


@listed("give, key", cases(LOOPS))
def test_what_a_loop_of_ones_own_cannot_use_is_refused(give: Give, key: str) -> None:
    with naming(key):
        give()


@listed("name", ["fedavg", *(name for name in REPLACES if not METHODS[name]().exchanges)])
def test_control_of_what_a_loop_can_use(name: str) -> None:
    a_round(METHODS[name]())
    assert rated(0.0).instruction().learning_rate == 0
