"""What a command imports, without the collector of garbage; and Ctrl-C between two writes of one round, which waits for the second."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim

from fl_bn.federation.optimizers import SGD, Adam
from fl_bn.support.imports import without_gc

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "flwr", "ray", "numpy", "scipy", "sklearn", "matplotlib", "torchvision", "pandas")
ROUND_1 = "rounds=1 dataset='digits' model='mlp' clients=2 local-steps=1 output='' momentum=0.9"


def loaded(program: str, names: tuple[str, ...]) -> list[str]:
    """Which modules of ``names`` a fresh interpreter has loaded after ``program``."""
    ask = f"{program}\nimport json, sys\nprint(json.dumps([name for name in {names!r} if name in sys.modules]))"
    done = subprocess.run([sys.executable, "-c", ask], cwd=ROOT, capture_output=True, text=True, check=True, timeout=200)
    found: list[str] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_the_command_line_imports_neither_torch_nor_flower() -> None:
    assert loaded("import fl_bn.cli.main", HEAVY) == []
    assert loaded("import torch", HEAVY)[:1] == ["torch"]  # control


OPERATED = ("kit", "membership", "supervisor", "status", "launch", "runs", "control", "doctor", "verify")


def test_what_an_operator_types_imports_neither_torch_nor_flower() -> None:
    """A server's `fl-bn start` stays in memory for months: 60 MB, where torch would make it 600."""
    check = "assert not {'torch', 'flwr'} & sys.modules.keys(), what"
    each = f"import importlib, sys\nfor what in {OPERATED}:\n    importlib.import_module('fl_bn_site.' + what)\n    {check}"
    assert loaded(each, ("torch", "flwr", "fl_bn_site.kit")) == ["fl_bn_site.kit"]


@pytest.mark.slow
def test_a_run_imports_nothing_that_its_rounds_do_not_need() -> None:
    unneeded = ("torch._dynamo", "sklearn", "matplotlib", "ray", "torchvision", "pandas", "scipy.stats", "tensorboard")
    run = f"from fl_bn.cli.main import run\nrun({ROUND_1!r})"
    assert loaded(run, (*unneeded, "fl_bn.flower")) == ["fl_bn.flower"]


MAKERS: list[tuple[Callable[..., Any], Callable[..., Any], dict[str, float]]] = [
    (SGD, optim.SGD, {"lr": 0.1}),
    (SGD, optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-3}),
    (partial(SGD, foreach=True), optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-3}),  # as clients make it
    (Adam, optim.Adam, {"lr": 0.01, "weight_decay": 1e-3}),
]


@pytest.mark.parametrize(("ours", "theirs", "options"), MAKERS)
def test_eager_optimizers_give_torchs_bits(ours: Callable[..., Any], theirs: Callable[..., Any], options: dict[str, float]) -> None:
    def trained(make: Callable[..., Any], **more: float) -> torch.Tensor:
        torch.manual_seed(0)
        model = nn.Linear(7, 3)
        optimizer = make(model.parameters(), **{**options, **more})
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.randn(4, 7)).square().sum().backward()
            optimizer.step()
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    assert torch.equal(trained(ours), trained(theirs))
    assert not torch.equal(trained(ours), trained(theirs, lr=options["lr"] * 1.01))  # control
    assert isinstance(ours([nn.Parameter(torch.zeros(1))]), theirs)  # type: ignore[arg-type]


def test_a_failing_import_turns_the_collector_of_garbage_on_again() -> None:
    """What was loaded without it is never looked at again."""
    with pytest.raises(ModuleNotFoundError), without_gc():  # noqa: PT012
        assert not gc.isenabled()
        raise ModuleNotFoundError
    assert gc.isenabled()
    assert gc.get_freeze_count() > 0
    gc.unfreeze()
