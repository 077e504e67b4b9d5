"""A whole federation in a file: the bits of a run that was never interrupted, in every method and engine; and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim import SGD

from fl_bn import Federation, SeededBatches, methods
from fl_bn.objectives import Moon, Scaffold
from tests.doors.inner import Damaged, generators, server_optimizer
from tests.doors.test_federation import TEST, made
from tests.doors.test_federation import net as plain_net
from tests.doors.test_loaders import ORDERS, own_order
from tests.listed import listed
from tests.refusals import naming


def net(width: int = 8, momentum: float | None = 0.1) -> nn.Sequential:
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(width, momentum=momentum)
    return nn.Sequential(nn.Linear(6, width), norm, nn.ReLU(), nn.Dropout(0.2), nn.Linear(width, 3))


CLIENTS = [SeededBatches(*made(client, 24), 8) for client in range(4)]


def federation(method: str = "fedavg", **options: Any) -> Federation:
    given = {"clients": CLIENTS, "test": TEST, "fraction": 0.75, "model": net(), **options}
    if name := given.get("server_optimizer"):
        given["server_optimizer"] = server_optimizer(name, learning_rate=0.01)
    chosen = given.pop("chosen", None) or methods.METHODS[method]()
    return Federation(given.pop("model"), chosen, given.pop("clients"), **given)


def state(fed: Federation) -> dict[str, Tensor]:
    own = {f"{i}/{name}": tensor for i in range(len(fed.clients)) for name, tensor in fed.client_model(i).state_dict().items()}
    return {**fed.model.state_dict(), **own}


def same(found: Federation, wanted: Federation) -> bool:
    tensors = state(wanted)
    return all(torch.equal(tensor, tensors[name]) for name, tensor in state(found).items())


def shown(records: list[Any]) -> list[str]:
    """Records without the clock; their text, since a NaN equals nothing."""
    return [repr(replace(one, seconds=0.0, clients=[replace(client, waited=0.0) for client in one.clients])) for one in records]


@pytest.mark.sample("[a", "[moon", "[one p")
@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("fedbn", {}),
        ("fedavg", {"model": net(momentum=None)}),
        ("fedtan2", {}),
        ("silobn", {"workers": 2, "objective": Scaffold(), "optimizer": lambda parameters: SGD(parameters, lr=0.05)}),
        ("silobn", {"objective": Moon(), "server_optimizer": "fedadam"}),
        ("hbn", {"engine": "vectorised", "model": nn.Sequential(*(layer for layer in net() if not isinstance(layer, nn.Dropout)))}),
    ],
    ids=["at home", "averages of all batches", "layer by layer", "scaffold in workers", "moon and fedadam", "one program"],
)
def test_a_federation_goes_on_with_the_bits_of_one_never_interrupted(method: str, options: dict[str, Any], tmp_path: Path) -> None:
    """With dropout and cohorts; tests/conformance does so for every method."""
    path = tmp_path / "state.safetensors"
    whole, first = federation(method, **options), federation(method, **options)
    list(whole.run(4))
    for record in first.run(4):
        if record.round == 2:
            first.checkpoint(path)  # and the process ends, as it were
            break
    second = federation(method, **options)
    second.resume(path)
    assert shown(second.history) == shown(whole.history[:2])
    assert [record.round for record in second.run(4)] == [3, 4]
    assert shown(second.history) == shown(whole.history)
    assert same(second, whole)
    assert not same(first, whole)  # control: round 2's are others


@pytest.mark.parametrize("kind", ORDERS)
def test_loaders_go_on_with_the_state_of_their_generators(kind: str, tmp_path: Path) -> None:
    whole, first, second, other = (Federation(plain_net(), methods.fedavg(), own_order(kind)) for _ in range(4))
    list(whole.run(4))
    next(records := first.run(4))
    first.checkpoint(tmp_path / "state")
    records.close()
    for fed in (second, other):
        fed.resume(tmp_path / "state")
    for one in (one for loader in other.clients for one in generators(loader)):
        one.manual_seed(5)
    list(second.run(4))
    list(other.run(4))
    assert same(second, whole)
    assert not same(other, whole)  # control


FIXBN: tuple[str, dict[str, Any]] = ("fixbn", {})
OTHER: dict[str, tuple[tuple[str, dict[str, Any]], tuple[str, dict[str, Any]], str]] = {
    "method": (FIXBN, ("fedbn", {}), "method"),
    "network": (FIXBN, ("fixbn", {"model": net(9)}), "network"),
    "clients": (FIXBN, ("fixbn", {"clients": CLIENTS[:3]}), "clients"),
    "seed": (FIXBN, ("fixbn", {"seed": 1}), "seed"),
    "option of the phases": (FIXBN, ("fixbn", {"chosen": methods.fixbn(freeze_after=3)}), "calendar"),
    "option of the layers": (("gn", {}), ("gn", {"chosen": methods.gn(groups=4)}), "network"),
}


@listed("same, other, key", [pytest.param(*case, id=name) for name, case in OTHER.items()])
def test_what_is_of_another_federation_is_refused_in_one_sentence(same: Any, other: Any, key: str, tmp_path: Path) -> None:
    path, fed = tmp_path / "state.safetensors", federation(same[0], **same[1])
    with naming("finished round"):
        fed.checkpoint(path)
    next(fed.run(4))
    fed.checkpoint(path)
    with naming(key) as caught:
        federation(other[0], **other[1]).resume(path)
    assert "\n" not in str(caught.value)
    again = federation(same[0], **same[1])
    again.resume(path)  # control
    with naming("of 4"):
        next(again.run(5))
    assert [record.round for record in again.run(4)] == [2, 3, 4]
    again.checkpoint(path)
    over = federation(same[0], **same[1])
    for rounds, left in ((4, []), (2, [1, 2])):  # of a run that is over nothing is left; another number of rounds is another run
        over.resume(path)
        assert [record.round for record in over.run(rounds)] == left


def test_a_file_that_is_damaged_or_another_is_refused_and_runs_no_code(tmp_path: Path) -> None:
    path, fed = tmp_path / "state.safetensors", federation()
    next(fed.run(2))
    fed.checkpoint(path)
    assert load_file(path)  # what any reader of safetensors opens
    (tmp_path / "cut").write_bytes(path.read_bytes()[:-3])
    save_file({"a": torch.zeros(1)}, tmp_path / "other")
    torch.save(fed.model.state_dict(), tmp_path / "pickle")
    for bad in ("cut", "other", "pickle"):
        with pytest.raises(Damaged):
            federation().resume(tmp_path / bad)
