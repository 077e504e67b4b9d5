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
from torch.optim import LBFGS, SGD, AdamW, SparseAdam
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from fl_bn import Classification, EarlyStop, Federation, SeededBatches, convert, local_round, methods, per_client, server_state
from fl_bn.methods import METHODS, Method
from fl_bn.objectives import Scaffold
from tests.doors.inner import Defence
from tests.listed import listed
from tests.refusals import naming

Give = Callable[[], Any]
FEDAVG = methods.fedavg()


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def batches(n: int = 8, seed: int = 1) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(n, 5, generator=generator), torch.randint(0, 3, (n,), generator=generator))]


def fed(method: Any = FEDAVG, model: Any = None, clients: Any = None, **named: Any) -> Federation:
    given = [batches(seed=i) for i in range(3)] if clients is None else clients
    return Federation(model or net(), method, given, **{"workers": 1, **named})


def cases(table: dict[str, tuple[Any, ...]]) -> list[Any]:
    return [pytest.param(*case, id=name) for name, case in table.items()]


def loader() -> DataLoader[tuple[Tensor, ...]]:
    return DataLoader(TensorDataset(*batches()[0]), batch_size=4)


def in_processes() -> DataLoader[tuple[Tensor, ...]]:
    return DataLoader(TensorDataset(*batches()[0]), batch_size=4, num_workers=2)


class Pictures(Dataset[tuple[Tensor, int]]):
    """As torchvision's: each element is a picture and its class."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.ones(5), index % 3


class WholeBatches(Dataset[tuple[Tensor, Tensor]]):
    """A dataset of one's own, whose elements are batches."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index >= len(self):
            raise IndexError
        return batches(seed=index)[0]


def of_others(parameters: Any) -> SGD:
    return SGD(net().parameters(), lr=0.1)


def with_one_more(parameters: Any) -> SGD:
    return SGD([*parameters, nn.Parameter(torch.zeros(1))], lr=0.1)


ONCE: dict[str, Callable[[], Any]] = {
    "generator": lambda: (batch for batch in batches()),
    "list_iterator": lambda: iter(batches()),
}
TESTS = [batches(seed=i) for i in (7, 8, 9)]
ARGUMENTS: dict[str, tuple[dict[str, Any], str]] = {
    "optimizer of other parameters": ({"optimizer": of_others}, "SGD"),
    "optimizer of one parameter more": ({"optimizer": with_one_more}, "1 of the 7"),
    "optimizer that is made already": ({"optimizer": [SGD, of_others(None), SGD]}, "client 1"),
    "optimizer for too few": ({"optimizer": [SGD, SGD]}, "optimizer"),
    "loss that is a number": ({"loss": 3}, "loss"),
    "task that is a class": ({"task": Classification}, "task"),
    "task of a bare function": ({"task": lambda client: Classification()}, "per_client"),
    "metric that is a function": ({"metrics": {"auc": max}}, "'auc'"),
    "metric that is a class": ({"metrics": {"auc": Classification}}, "'auc'"),
    "metric of a name that is taken": ({"metrics": {"accuracy": max}}, "'accuracy'"),
    "clients as one loader": ({"clients": loader()}, "clients"),
    "clients from a generator": ({"clients": (batches() for _ in range(3))}, "list(clients)"),
    "clients by name": ({"clients": {"a": batches()}}, "list(clients.values())"),
    "no clients": ({"clients": []}, "client"),
    "client that is a number": ({"clients": [3]}, "client 0"),
    "client that is a batch": ({"clients": batches()}, "client 0"),
    "client that is a list of loaders": ({"clients": [[loader()]]}, "client 0"),
    "client that is a dataset of samples": ({"clients": [loader().dataset]}, "client 0"),
    "test of samples": ({"test": Subset(Pictures(), [1])}, "test"),
    "test for too few": ({"test": per_client(TESTS[:2])}, "test"),
    **{f"client that is a {kind}": ({"clients": [batches(), make()]}, "client 1") for kind, make in ONCE.items()},
    **{f"test that is a {kind}": ({"test": make()}, "test") for kind, make in ONCE.items()},
    "callbacks of a class": ({"callbacks": [EarlyStop]}, "callbacks"),
    "local_epochs in a text": ({"local_epochs": "2"}, "local_epochs"),
    "workers of a half": ({"workers": 1.5}, "workers"),
    "workers of one program": ({"workers": 2, "engine": "vectorised"}, "workers"),
    "method by name": ({"method": "fbn"}, "method"),
    "server_optimizer by name": ({"server_optimizer": "fedadam"}, "server_optimizer"),
    "model that is a function": ({"model": print}, "model"),
    "model with a lazy layer": ({"model": nn.Sequential(nn.LazyLinear(2))}, "LazyLinear"),
    "model with nothing to train": ({"model": net().requires_grad_(False)}, "requires_grad"),
    "objective that FedTAN cannot follow": ({"method": methods.fedtan(), "objective": Scaffold()}, "objective"),
    "objective that no rule guards": ({"objective": Scaffold(), "defence": Defence(1, "median", "median")}, "robust"),
    "objective of plain SGD, with AdamW": ({"objective": Scaffold(), "optimizer": partial(AdamW, lr=0.1)}, "SGD"),
}


@listed("options, key", cases(ARGUMENTS))
def test_an_argument_of_federation_is_refused_before_round_1(options: dict[str, Any], key: str) -> None:
    with naming(key) as caught:
        fed(**options)
    assert "\n" not in str(caught.value)


@listed(
    "options",
    [
        {"optimizer": lambda parameters: SGD([*parameters][:2], lr=0.1)},  # a part of the parameters
        {"scheduler": lambda optimizer: None},
        {"clients": [WholeBatches(), WholeBatches()]},
    ],
)
def test_control_its_like_is_taken(options: dict[str, Any]) -> None:
    assert next(fed(**options).run(2)).aggregated


def in_no_grad(off: Any) -> Any:
    with off():
        return list(fed().run(1))


RUNS: dict[str, tuple[Give, str]] = {
    "optimizer that needs a closure": (lambda: list(fed(optimizer=LBFGS).run(1)), "closure"),
    "optimizer of sparse gradients": (lambda: list(fed(optimizer=SparseAdam).run(1)), "SparseAdam"),
    "scheduler that needs a metric": (lambda: list(fed(scheduler=ReduceLROnPlateau).run(1)), "metrics"),
    **{f"{rounds!r} rounds": (lambda rounds=rounds: list(fed().run(rounds)), "rounds") for rounds in (1.5, "2", True, None, -1)},
    **{
        f"a schedule of {factor!r}": (lambda factor=factor: list(fed(schedule=lambda *_: factor).run(1)), "schedule")
        for factor in (-1.0, float("nan"), None, "1")
    },
    "a loss that is a number": (lambda: list(fed(loss=lambda output, y: 0.5).run(1)), "0.5"),
    "a loss of each sample": (lambda: list(fed(loss=lambda output, y: output.sum(1)).run(1)), "(8,)"),
    "no test batch": (lambda: list(fed(test=[]).run(1)), "test"),
    "no gradients": (lambda: in_no_grad(torch.no_grad), "no_grad"),
    "loaders with workers, in workers": (lambda: list(fed(clients=[in_processes()] * 2, workers=2).run(1)), "num_workers=2"),
    "single samples": (lambda: fed().evaluate([(torch.randn(5), 1), (torch.randn(5), 0)]), "client 0"),
    "test batches of each client from an iterator": (lambda: fed(methods.fedbn()).evaluate(ONCE["generator"]()), "iterated over again"),
    **{f"the network of client {one!r}": (lambda one=one: trained().client_model(one), repr(one)) for one in (3, -1, "0", 1.0, True, None)},
    "fewer targets than inputs": (lambda: SeededBatches(torch.zeros(8, 4), torch.zeros(5), 4), "(5,)"),
    "a batch size of a float": (lambda: SeededBatches(torch.zeros(8, 4), torch.zeros(8), 4.0), "batch_size"),
    "a table of bytes": (lambda: SeededBatches(torch.zeros(8, 5, dtype=torch.uint8), torch.zeros(8), 4), "uint8"),
    "images of integers": (lambda: SeededBatches(torch.zeros(4, 1, 2, 2, dtype=torch.int64), torch.zeros(4), 4), "int64"),
}


def trained(method: Method | None = None) -> Federation:
    made = fed(method or methods.fedbn())
    list(made.run(1))
    return made


@listed("give, key", cases(RUNS))
def test_what_a_run_cannot_use_is_refused(give: Give, key: str) -> None:
    with naming(key, Exception):
        give()


def test_control_of_what_a_run_can_use() -> None:
    with torch.no_grad():
        assert list(fed(methods.fbn()).run(0)) == []  # measuring needs no gradients
    done = trained()
    assert not torch.equal(done.client_model(0)[1].weight, done.client_model(np.int64(2))[1].weight)
    assert fed(test=batches()).evaluate(ONCE["generator"]()) == fed(test=batches()).evaluate(batches())  # once is enough for one network
    assert next(iter(SeededBatches(torch.zeros(4, 1, 2, 2, dtype=torch.uint8), torch.zeros(4), 4)))[0].max() == -1  # an image


def test_an_optimiser_that_forgets_its_argument_later_is_refused_in_its_round() -> None:
    """The function may behave well once. Without the check in each round, no weight changed in it."""
    made: list[torch.optim.Optimizer] = []

    def make(parameters: Any) -> torch.optim.Optimizer:
        made.append(SGD(parameters, lr=0.1))
        return made[0]

    with naming("SGD") as caught:
        list(fed(optimizer=make).run(1))
    assert caught.value.__notes__ == ["at client 0, in round 1"]


class Wrong:
    """Batches of which the network can make nothing, or that cannot be read."""

    def __init__(self, error: type[Exception]) -> None:
        self.error = error

    def __iter__(self) -> Iterator[Any]:
        if self.error is OSError:
            raise OSError("the disk is gone")
        yield batches()[0][0].double(), batches()[0][1]


@listed("error", [RuntimeError, OSError])
@pytest.mark.parametrize("workers", [1, 2])
def test_an_error_of_a_client_names_it_and_its_round(workers: int, error: type[Exception]) -> None:
    with pytest.raises(error) as caught:
        list(fed(clients=[batches(), Wrong(error)], workers=workers).run(1))
    assert caught.value.__notes__[0] == "at client 1, in round 1"
    assert len(caught.value.__notes__) == workers  # the trace in the other process


def penalised(model: nn.Module, output: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(output, y) + sum(p.abs().sum() for p in model.parameters())


def test_a_loss_that_uses_the_given_network_is_refused_by_its_gradients() -> None:
    model = net()
    for loss in (partial(penalised, model), lambda output, y: F.cross_entropy(output, y) + model[0].weight.sum()):
        with naming("gradients"):
            list(fed(model=model, loss=loss).run(1))
    other = partial(penalised, net())  # control, a teacher's, say: not the network that clients copy
    assert next(fed(model=model, loss=other).run(1)).aggregated


class Small(nn.Module):
    """A network whose state_dict leaves out what begins with ``less``, to keep files small."""

    def __init__(self, less: str) -> None:
        super().__init__()
        self.body, self.less = net(), less

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)

    def state_dict(self, *args: Any, **named: Any) -> dict[str, Any]:
        return {name: value for name, value in super().state_dict(*args, **named).items() if not name.startswith(self.less)}

    def load_state_dict(self, state: Any, strict: bool = True, assign: bool = False) -> Any:
        return super().load_state_dict(state, False, assign)


def test_a_state_dict_that_lacks_what_is_trained_is_refused() -> None:
    frozen = Small("body.0")
    frozen.body[0].requires_grad_(False)
    for give in (lambda model: list(fed(model=model).run(1)), lambda model: server_state(model, FEDAVG, rounds=1)):
        give(Small("none"))  # control
        give(frozen)  # control: what does not change need not travel
        for less in ("body.0.weight", "body.1.running_mean"):
            with naming(less):
                give(Small(less))


# Loops of one's own


def entered(method: Method, model: nn.Module, *kept: Any, of: nn.Module | None = None, **options: Any) -> None:
    with local_round(model, method, server_state(of or net(), method, rounds=2).instruction(), *kept, **options):
        pass


def a_round(method: Method = FEDAVG, train: Any = None, **reply: Any) -> Any:
    model = convert(net(), method)
    with local_round(model, method, server_state(net(), method, rounds=2).instruction()) as round:
        if method.measures_first:
            round.measure(batches())
        trains = model if train is None else train
        optimizer = SGD(trains.parameters(), lr=0.1)
        F.cross_entropy(trains(batches()[0][0]), batches()[0][1]).backward()
        optimizer.step()
    return round.reply(8, **reply)


def rated(wrong: Any, at: int = 1) -> Any:
    return server_state(net(), FEDAVG, rounds=3, rate=lambda round, rounds: wrong if round == at else 0.1)


REPLACES = [name for name, make in METHODS.items() if make().layer and make().needs_batch_norm and not make().local_in]
LOOPS: dict[str, tuple[Give, str]] = {
    **{f"{n!r} rounds": (lambda n=n: server_state(net(), FEDAVG, rounds=n), "rounds") for n in (0, -3, 2.0, True, None)},
    **{f"rate of {r!r}": (lambda r=r: rated(r), "rate") for r in (None, "0.1", True, -0.1, float("nan"), float("inf"), 1j)},
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


@listed("name", [*REPLACES, "fedavg", "fixbn"])
def test_control_of_what_a_loop_can_use(name: str) -> None:
    method = METHODS[name]()
    if method.exchanges:
        return
    assert a_round(method, metrics={"acc": torch.tensor(0.5)})[0].samples == 8
    assert rated(0.0).instruction().learning_rate == 0
