"""Initial weights from a file: taken over whole, and what is wrong with the file is said."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fl_bn.bn.conversion import convert
from fl_bn.methods import METHODS
from fl_bn.models import build
from tests.refusals import naming

State = dict[str, Tensor]


def network(classes: int = 10, seed: int = 0, weights: str = "") -> nn.Module:
    return build("digits-cnn-small", classes=classes, image_size=16, seed=seed, weights=weights)


def write(folder: Path, state: object, suffix: str = ".pt") -> str:
    path = folder / f"weights{suffix}"
    if suffix == ".safetensors":
        assert isinstance(state, dict)
        save_file({k: t.contiguous() for k, t in state.items()}, path)
    else:
        torch.save(state, path)
    return str(path)


@pytest.mark.parametrize("suffix", [".pt", ".pth", ".safetensors"])
def test_every_tensor_is_taken_over(suffix: str, tmp_path: Path) -> None:
    source = network(seed=5)
    source(torch.rand(4, 3, 16, 16))  # statistics and counters other than at the start
    model, fresh = network(weights=write(tmp_path, source.state_dict(), suffix)), network()
    want = source.state_dict()
    assert all(torch.equal(tensor, want[name]) for name, tensor in model.state_dict().items())
    drawn = [name for name in want if not name.endswith(("norm.weight", "norm.bias"))]  # the others start alike
    assert not any(torch.equal(fresh.state_dict()[name], want[name]) for name in drawn)  # control


def test_a_head_for_other_classes_stays_fresh_and_the_rest_is_taken_over(tmp_path: Path) -> None:
    source = network(classes=7, seed=5)
    model, fresh = network(weights=write(tmp_path, source.state_dict())), network()
    for name, tensor in model.state_dict().items():
        of = fresh if name.startswith("head.") else source
        assert torch.equal(tensor, of.state_dict()[name]), name


def test_the_counters_may_be_missing_as_in_the_model_of_a_run(tmp_path: Path) -> None:
    state = {k: t for k, t in network(seed=5).state_dict().items() if not k.endswith("num_batches_tracked")}
    assert torch.equal(network(weights=write(tmp_path, state, ".safetensors")).get_parameter("head.weight"), state["head.weight"])


def without(state: State) -> State:
    return {k: t for k, t in state.items() if not k.startswith("block1")}


def renamed(state: State) -> State:
    return {f"net.{k}": t for k, t in state.items()}


def reshaped(state: State) -> State:
    return state | {"block1.conv.weight": torch.zeros(16, 1, 3, 3)}


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (without, "missing: block1."),
        (renamed, "without a place: net.block1.conv.weight, "),
        (reshaped, "block1.conv.weight (16, 1, 3, 3)"),
        (lambda state: {"model": state, "epoch": 3}, "model, epoch"),
        (lambda state: [1, 2], "list"),
    ],
)
def test_files_of_other_networks(change: Callable[[State], object], word: str, tmp_path: Path) -> None:
    path = write(tmp_path, change(network().state_dict()))
    with naming(word):
        network(weights=path)


class Harmful:
    def __reduce__(self) -> tuple[Callable[..., object], tuple[str, ...]]:
        return print, ("this must not run",)


def test_no_code_is_run_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, {"head.weight": Harmful()})
    with naming("weights.pt"):
        network(weights=path)
    assert capsys.readouterr().out == ""
    torch.load(path, weights_only=False)
    assert "this must not run" in capsys.readouterr().out  # control


def test_files_that_are_cut_short_absent_or_of_another_kind(tmp_path: Path) -> None:
    for suffix in (".pt", ".safetensors"):
        path = Path(write(tmp_path, network().state_dict(), suffix))
        path.write_bytes(path.read_bytes()[:1000])
    (tmp_path / "weights.h5").write_bytes(b"")
    for name in ("weights.pt", "weights.safetensors", "absent.pt", "weights.h5"):
        with naming(name):
            network(weights=str(tmp_path / name))


def test_weights_of_a_converted_network_fit_that_one_alone(tmp_path: Path) -> None:
    """Of a run of gn: the same names, without running statistics; loaded loosely it would normalise with 0 and 1."""
    converted = convert(network(seed=5), METHODS["gn"]())
    path = write(tmp_path, converted.state_dict(), ".safetensors")
    with naming("missing: block1.norm.running_mean"):
        network(weights=path)
    again = convert(network(), METHODS["gn"]())
    again.load_state_dict(load_file(path))  # as README says, strictly
    assert torch.equal(again.get_parameter("head.weight"), converted.get_parameter("head.weight"))
