"""Networks by name: shapes, seeds, initial weights from a file, and names and files that lead nowhere."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from fl_bn.models import MODELS, build
from tests.listed import listed
from tests.refusals import naming


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("channels", "image_size"), [(3, 32), (1, 28), (3, 20)])
def test_ours_fit_the_images_and_learn(name: str, channels: int, image_size: int) -> None:
    model = build(name, classes=7, channels=channels, image_size=image_size, seed=0)
    scores = model(torch.rand(5, channels, image_size, image_size))
    assert scores.shape == (5, 7)
    scores.logsumexp(1).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    layers = [layer for layer in model.modules() if not list(layer.children())]
    norms = [(before, after) for before, after in pairwise(layers) if isinstance(after, nn.modules.batchnorm._BatchNorm)]
    assert norms
    assert all(getattr(before, "bias", None) is None for before, _ in norms), "the BatchNorm's shift would make it redundant"


def test_a_table_s_network_brings_its_columns_to_one_scale() -> None:
    model = build("table-mlp", classes=10, channels=10, image_size=1, seed=0)
    assert sum(p.numel() for p in model.parameters()) == 20 + 640 + 128 + 4096 + 128 + 650 == 5_662
    x = torch.rand(30, 10)
    scores = model.train()(x)
    torch.testing.assert_close(model(x * 1e4 + 7), scores, rtol=1e-2, atol=1e-2)
    plain = build("mlp", classes=10, channels=10, image_size=1, seed=0).train()
    assert not torch.allclose(plain(x * torch.arange(1, 11)), plain(x), atol=0.1)  # control
    torch.testing.assert_close(model(x * torch.arange(1, 11)), scores, rtol=1e-2, atol=1e-2)


def test_a_seed_fixes_the_weights_and_without_one_the_global_generator_decides() -> None:
    def weights(seed: int | None) -> Tensor:
        return build("mlp", classes=10, seed=seed).get_parameter("head.weight")

    torch.manual_seed(5)
    state = torch.get_rng_state()
    assert torch.equal(weights(1), weights(1))
    assert not torch.equal(weights(1), weights(2))
    assert torch.equal(torch.get_rng_state(), state)  # the global generator is spared
    first, second = weights(None), weights(None)
    torch.manual_seed(5)
    assert torch.equal(weights(None), first)
    assert not torch.equal(first, second)


def own(classes: int, channels: int, image_size: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(channels * image_size**2, classes))


def broken(classes: int, channels: int, image_size: int) -> nn.Module:
    raise TypeError("from inside")


def other_arguments(width: int) -> nn.Module:
    raise AssertionError("this is not called")


def no_network(classes: int, channels: int, image_size: int) -> str:
    return "a network"


HERE = "tests.models.test_build"


@pytest.mark.parametrize("name", [f"{HERE}:own", "resnet18", "googlenet"])
def test_ones_own_function_and_torchvisions_by_name(name: str) -> None:
    model, again = (build(name, classes=4, image_size=64, seed=1) for _ in range(2))
    assert model.train()(torch.rand(2, 3, 64, 64)).shape == (2, 4)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


@listed(
    ("name", "options", "error", "word"),
    [
        (f"{HERE}:absent", {}, ValueError, "'absent'"),
        (f"{HERE}:HERE", {}, ValueError, "'HERE'"),
        (f"{HERE}:other_arguments", {}, ValueError, f"{HERE}:other_arguments"),
        (f"{HERE}:no_network", {}, ValueError, "str"),
        (f"{HERE}:broken", {}, TypeError, "from inside"),
        ("no_such_module:network", {}, ValueError, "'no_such_module'"),
        (f"{HERE}:own:again", {}, ValueError, f"{HERE}:own:again"),
        ("resnet21", {}, ValueError, "'resnet21'"),
        ("fasterrcnn_resnet50_fpn", {}, ValueError, "one of simple-cnn, digits-cnn-small, mlp, "),
        ("resnet18", {"channels": 1}, ValueError, "3 channels"),
        ("simple-cnn", {"image_size": 7}, ValueError, "image_size=7"),
        ("mlp", {"image_size": 0}, ValueError, "image_size=0"),
        ("mlp", {"classes": 0}, ValueError, "at least 1 class"),
    ],
)
def test_what_can_be_wrong_with_a_network(name: str, options: dict[str, int], error: type[Exception], word: str) -> None:
    with naming(word, error):
        build(name, **{"classes": 4, **options})


State = dict[str, Tensor]


def digits(classes: int = 10, seed: int = 0, weights: str = "") -> nn.Module:
    return build("digits-cnn-small", classes=classes, image_size=16, seed=seed, weights=weights)


def write(folder: Path, state: Any, suffix: str = ".pt") -> str:
    path = folder / f"weights{suffix}"
    if suffix == ".safetensors":
        save_file({k: t.contiguous() for k, t in state.items()}, path)
    else:
        torch.save(state, path)
    return str(path)


def same(model: nn.Module, state: State, start: str = "") -> bool:
    return all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items() if name.startswith(start))


@listed("suffix", [".pt", ".safetensors"])
def test_every_tensor_is_taken_over(suffix: str, tmp_path: Path) -> None:
    source = digits(seed=5)
    source(torch.rand(4, 3, 16, 16))  # statistics and counters other than at the start
    state = source.state_dict()
    assert same(digits(weights=write(tmp_path, state, suffix)), state)
    assert not same(digits(), state, "block1.conv")  # control
    without_counters = {k: t for k, t in state.items() if not k.endswith("num_batches_tracked")}  # as in the model of a run
    assert same(digits(weights=write(tmp_path, without_counters, suffix)), state, "head")


def test_a_head_for_other_classes_stays_fresh_and_the_rest_is_taken_over(tmp_path: Path) -> None:
    source = digits(classes=7, seed=5).state_dict()
    model = digits(weights=write(tmp_path, source))
    assert same(model, digits().state_dict(), "head")
    assert same(model, source, "block")


@listed(
    ("change", "word"),
    [
        (lambda state: {k: t for k, t in state.items() if not k.startswith("block1")}, "missing: block1."),
        (lambda state: state | {"block1.conv.weight": torch.zeros(16, 1, 3, 3)}, "block1.conv.weight (16, 1, 3, 3)"),
        (lambda state: {"model": state, "epoch": 3}, "model, epoch"),
        (lambda state: [1, 2], "list"),
    ],
)
def test_files_of_other_networks(change: Callable[[State], object], word: str, tmp_path: Path) -> None:
    path = write(tmp_path, change(digits().state_dict()))
    with naming(word):
        digits(weights=path)


class Harmful:
    def __reduce__(self) -> tuple[Callable[..., object], tuple[str, ...]]:
        return print, ("this must not run",)


def test_no_code_is_run_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, {"head.weight": Harmful()})
    with naming("weights.pt"):
        digits(weights=path)
    assert capsys.readouterr().out == ""
    torch.load(path, weights_only=False)
    assert "this must not run" in capsys.readouterr().out  # control


def test_files_that_are_cut_short_absent_or_of_another_kind(tmp_path: Path) -> None:
    for suffix in (".pt", ".safetensors"):
        path = Path(write(tmp_path, digits().state_dict(), suffix))
        path.write_bytes(path.read_bytes()[:1000])
    (tmp_path / "weights.h5").write_bytes(b"")
    for name in ("weights.pt", "weights.safetensors", "absent.pt", "weights.h5"):
        with naming(name):
            digits(weights=str(tmp_path / name))
