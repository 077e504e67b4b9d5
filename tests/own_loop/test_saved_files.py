"""What is saved loads, with ``strict=True``, into the network as its owner wrote it."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fl_bn import Federation, convert, methods
from fl_bn.flower import InProcessGrid, OwnAppStrategy
from fl_bn.methods import METHODS
from tests.conformance.cases import every_method
from tests.doors.doors import own_app
from tests.doors.inner import load_weights
from tests.listed import listed
from tests.refusals import naming

X, Y = torch.randn(12, 4, generator=torch.Generator().manual_seed(0)), torch.arange(12) % 2
CLIENTS = [[(X[i::3], Y[i::3])] * 5 for i in range(3)]


class WithIds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ids", torch.arange(4))
        self.register_buffer("scratch", torch.ones(2), persistent=False)
        norm = nn.BatchNorm1d(8)
        self.layers = nn.Sequential(nn.Linear(4, 8), norm, nn.ReLU(), nn.Linear(8, 8), norm, nn.Linear(8, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x[:, self.ids])  # type: ignore[no-any-return]


def net() -> nn.Module:
    torch.manual_seed(0)
    return WithIds()


def trained(method: str, model: nn.Module | None = None, rounds: int = 2) -> Federation:
    fed = Federation(net() if model is None else model, METHODS[method](), CLIENTS)
    list(fed.run(rounds))
    return fed


@every_method
def test_what_is_saved_loads_into_the_network_as_its_owner_wrote_it(method_name: str, tmp_path: Path) -> None:
    """With integer buffers, tied layers and counters. Where a method has layers of its own or keeps some, into the converted network."""
    if method_name in ("in", "fedwon"):  # which take no network of linear layers
        return
    fed, method = trained(method_name), METHODS[method_name]()
    fed.save(tmp_path / "model.safetensors")
    file, plain = load_file(tmp_path / "model.safetensors"), net()
    if method.has_statistics and not method.personal:  # docs/how-to/export.md has the same list
        plain.load_state_dict(file)
        assert int(plain.layers[1].num_batches_tracked) in ((2, 10) if method.exchanges else (10,))
        if method_name != "hbn":  # whose own layers mix
            assert torch.allclose(plain.eval()(X), fed.model(X), atol=1e-5)
        with naming('"ids"', RuntimeError):  # control: what travels
            net().load_state_dict(fed.server.shared.tensors())
        return
    missing, extra = convert(net(), method).load_state_dict(file, strict=False)
    assert not extra
    assert bool(missing) == method.personal
    if method.personal:  # the clients' own models have everything
        net().load_state_dict(fed.client_model(0).state_dict())


def test_a_flower_app_of_one_s_own_saves_the_same_file(tmp_path: Path) -> None:
    strategy = OwnAppStrategy(net(), methods.fbn(), fraction_evaluate=0)
    result = strategy.start(InProcessGrid(own_app(net(), methods.fbn(), CLIENTS, fresh=net), 3, {}), num_rounds=2)
    strategy.save(tmp_path / "model.safetensors")
    plain = net()
    plain.load_state_dict(load_file(tmp_path / "model.safetensors"))
    assert int(plain.layers[1].num_batches_tracked) == 10
    arrays = result.arrays.to_torch_state_dict()
    assert all(torch.equal(tensor, plain.state_dict()[name]) for name, tensor in arrays.items())
    net().load_state_dict(arrays)
    assert not all(torch.equal(tensor, net().state_dict()[name]) for name, tensor in arrays.items())  # control


def test_the_counter_goes_on_from_the_network_s(tmp_path: Path) -> None:
    model: Any = net()
    model.layers[1].num_batches_tracked += 100
    trained("fbn", model).save(tmp_path / "model.safetensors")
    assert int(load_file(tmp_path / "model.safetensors")["layers.1.num_batches_tracked"]) == 110


def a_part(model: Any) -> nn.Module:
    model.layers = nn.DataParallel(model.layers)
    return model  # type: ignore[no-any-return]


WRAPPERS: dict[str, Any] = {"parallel": nn.DataParallel, "compiled": partial(torch.compile, backend="eager"), "a part": a_part}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # dynamo's own
@pytest.mark.parametrize("kind", WRAPPERS)
def test_a_wrapper_changes_no_number_and_its_prefixes_are_not_in_the_file(kind: str, tmp_path: Path) -> None:
    path, plain = tmp_path / "model.safetensors", net()
    fed, wanted = trained("fbn", WRAPPERS[kind](net())), trained("fbn")
    fed.save(path)
    plain.load_state_dict(load_file(path))
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(plain.parameters(), wanted.model.parameters(), strict=True))
    with naming("Missing key", RuntimeError):  # control: the names of the wrapped network
        net().load_state_dict(fed.model.state_dict())
    other = WRAPPERS[kind](net())
    load_weights(other, str(path))  # and back
    assert all(torch.equal(a, b) for a, b in zip(other.parameters(), fed.model.parameters(), strict=True))


@listed("prefix", ["module.", "_orig_mod.module.", "other."])
def test_checkpoints_with_prefixes_of_wrappers_are_weights_to_start_from(prefix: str, tmp_path: Path) -> None:
    path, source, model = tmp_path / "weights.safetensors", net(), net()
    with torch.no_grad():
        source.layers[0].weight.add_(1)
    save_file({prefix + name: tensor.clone() for name, tensor in source.state_dict().items()}, path)
    with naming("another network") if prefix == "other." else nullcontext():
        load_weights(model, str(path))
    assert torch.equal(model.layers[0].weight, source.layers[0].weight) == (prefix != "other.")
