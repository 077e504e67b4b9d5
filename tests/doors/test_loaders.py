"""Door 1: what a loader draws is what its client counts for, and what it is measured in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Sampler, SubsetRandomSampler, TensorDataset

from fl_bn import Federation, methods, per_client
from fl_bn.methods import METHODS
from tests.conformance.cases import every_method
from tests.doors.inner import Defence
from tests.doors.test_federation import TEST, made, net
from tests.listed import listed

ALL = TensorDataset(*made(0, 1000))


def drawing(first: int, last: int, **options: object) -> DataLoader[tuple[Tensor, ...]]:
    """Of one data set that all clients have, the samples ``first`` .. ``last``."""
    return DataLoader(ALL, sampler=SubsetRandomSampler(range(first, last)), **options)  # type: ignore[arg-type]


def after(*loaders: object) -> dict[str, Tensor]:
    fed = Federation(net(), methods.fedavg(), loaders, local_epochs=2)  # type: ignore[arg-type]
    list(fed.run(1))
    return {name: tensor for name, tensor in fed.model.state_dict().items() if tensor.is_floating_point()}


def test_a_client_counts_by_what_its_sampler_drew() -> None:
    few, many = drawing(0, 20, batch_size=1000), drawing(20, 1000, batch_size=1000)
    fed = Federation(net(), methods.fedavg(), [few, many], local_epochs=2)
    (record,) = fed.run(1)
    assert [client.samples for client in record.clients] == [20, 980]
    both, one, other = after(few, many), after(few), after(many)
    for name, tensor in both.items():
        assert torch.allclose(tensor, (20 * one[name] + 980 * other[name]) / 1000, atol=1e-6), name
    alike = {name for name, tensor in both.items() if torch.allclose(tensor, (one[name] + other[name]) / 2, atol=1e-4)}
    assert alike == {"0.bias"}  # control: BatchNorm cancels it
    (record,) = Federation(net(), methods.fedavg(), [drawing(0, 42, batch_size=16, drop_last=True)]).run(1)
    assert [client.samples for client in record.clients] == [32]  # nor do samples count that a loader drops


@every_method
def test_a_client_that_drew_no_batch_is_left_out_and_a_round_of_such_clients_fails(method_name: str) -> None:
    if method_name in ("in", "fedwon"):  # which take no network of linear layers
        return
    for empty in ([1], [0, 1, 2]):
        loaders = [[] if client in empty else [made(client)] for client in range(3)]
        (record,) = Federation(net(), METHODS[method_name](), loaders).run(1)
        assert record.aggregated == (len(empty) < 3)
        assert [c.client for c in record.clients if "metrics/samples" in c.refused] == empty


def test_a_client_that_drew_no_batch_has_no_vote_and_leaves_the_liars_as_many() -> None:
    """The median of four and of five differ; were it counted among the liars, the mean of all would do."""

    def end(*loaders: Any) -> Tensor | None:
        fed = Federation(net(), methods.fbn(), loaders, defence=Defence(1, "median", "median"))
        (record,) = fed.run(1)
        return fed.model.state_dict()["0.weight"] if record.aggregated else None

    full = [[made(client)] for client in range(4)]
    four, with_empty, five = end(*full), end(*full, []), end(*full, [made(4)])
    assert four is not None
    assert torch.equal(with_empty, four)
    assert not torch.equal(five, four)  # control
    assert end(*full[:2], []) is None  # two, of whom one may lie


class Drawn(Sampler[list[int]]):
    """Draws batches from a sampler of its own, which is no ``BatchSampler``."""

    def __init__(self, data: TensorDataset, own: torch.Generator) -> None:
        self.sampler = RandomSampler(data, generator=own)

    def __iter__(self) -> Iterator[list[int]]:
        return iter([list(batch) for batch in np.array_split(list(self.sampler), 3)])


ORDERS: dict[str, Callable[[TensorDataset, torch.Generator], DataLoader[Any]]] = {
    "generator": lambda data, own: DataLoader(data, 16, shuffle=True, generator=own),
    "batch_sampler": lambda data, own: DataLoader(data, batch_sampler=BatchSampler(RandomSampler(data, generator=own), 16, False)),
    "one's own": lambda data, own: DataLoader(data, batch_sampler=Drawn(data, own)),
}


def own_order(kind: str, seed: int = 0) -> list[Any]:
    """Return each client's loader, whose every pass depends on the passes before. ``one for all``: they share a generator."""
    owns = [torch.Generator().manual_seed(seed + client) for client in range(3)]
    make = ORDERS.get(kind, ORDERS["generator"])
    return [make(TensorDataset(*made(client)), owns[0 if kind == "one for all" else client]) for client in range(3)]


def weights_after(method: str, kind: str, *, seed: int = 0, on_training_batches: bool = False, **options: Any) -> Tensor:
    loaders = own_order(kind, seed)
    fed = Federation(net(), METHODS[method](), loaders, test=per_client(loaders) if on_training_batches else TEST, **options)
    list(fed.run(4))
    return fed.model.state_dict()["0.weight"]


@pytest.mark.parametrize("kind", ["generator", "batch_sampler", "one for all"])
def test_how_often_and_on_what_is_evaluated_does_not_change_what_is_trained(kind: str) -> None:
    often, seldom = (weights_after("hbn", kind, evaluate_every=every) for every in (1, 4))
    assert torch.equal(often, seldom)
    assert not torch.equal(often, weights_after("hbn", kind, seed=9))  # control: the order counts
    on_training_batches = (weights_after("fedavg", kind, on_training_batches=True, evaluate_every=every) for every in (1, 4))
    assert all(torch.equal(weights_after("fedavg", kind, evaluate_every=4), one) for one in on_training_batches) or kind == "one for all"


class Whole(Tensor):
    """A tensor that, like MONAI's ``MetaTensor``, gives its class to what is computed from it, and that cannot be sliced."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.__getitem__, Tensor.chunk, Tensor.split, Tensor.unbind) and isinstance(args[0], cls):
            raise ValueError(f"a Whole has no slices, but {func.__name__} was called")
        return super().__torch_function__(func, types, args, kwargs or {})


class Dense(nn.Module):
    """Makes a plain tensor of an input of any form."""

    def forward(self, x: Tensor) -> Tensor:
        return x if x.layout is torch.strided else x.to_dense()


FORMS: dict[str, Callable[[Tensor], Any]] = {
    "plain": lambda x: x,
    "subclass": lambda x: x.as_subclass(Whole),
    "COO": Tensor.to_sparse,
    "CSR": Tensor.to_sparse_csr,
    "dict": lambda x: {"input": x},
}


@pytest.mark.filterwarnings("ignore:Sparse CSR:UserWarning")
@listed("method", ["fedavg", "fbn", "hbn", "fedtan", "fedbn"])
def test_inputs_of_any_form_train_what_plain_tensors_do(method: str) -> None:
    def trained(form: str) -> tuple[list[Any], list[Tensor]]:
        clients = [[(FORMS[form](x), y) for x, y in zip(*(t.split(8) for t in made(client, 24)), strict=True)] for client in range(3)]
        model = nn.Sequential(Dense(), *net(16), nn.BatchNorm1d(16), nn.ReLU(inplace=True), nn.Linear(16, 3))
        fed = Federation(model, METHODS[method](), clients, test=clients[0])
        records = [(record.loss, record.evaluation) for record in fed.run(2)]
        return records, [*fed.model.state_dict().values(), *fed.client_model(0).state_dict().values()]

    records, tensors = trained("plain")
    for form in FORMS:
        others, same = trained(form)
        assert str(records) == str(others), form
        assert all(map(torch.equal, tensors, same)), form
        assert {type(tensor) for tensor in same} == {Tensor}
