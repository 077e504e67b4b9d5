"""What a command imports, and that the optimisers which import less have torch's bits."""

from __future__ import annotations

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
from tests.listed import listed

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "flwr", "ray", "numpy", "scipy", "sklearn", "matplotlib", "torchvision", "pandas")
ROUND_1 = "rounds=1 dataset='digits' model='mlp' clients=2 local-steps=1 output='' momentum=0.9"


def loaded(program: str, names: tuple[str, ...]) -> list[str]:
    """Which modules of ``names`` a fresh interpreter has loaded after ``program``."""
    ask = f"{program}\nimport json, sys\nprint(json.dumps([name for name in {names!r} if name in sys.modules]))"
    done = subprocess.run([sys.executable, "-c", ask], cwd=ROOT, capture_output=True, text=True, check=True, timeout=200)
    found: list[str] = json.loads(done.stdout.splitlines()[-1])
    return found


OPERATED = ("kit", "membership", "supervisor", "status", "launch", "runs", "control", "doctor", "verify")


def test_what_is_typed_imports_neither_torch_nor_flower() -> None:
    """A server's `fl-bn start` stays in memory for months: 60 MB, where torch would make it 600."""
    operated = "; ".join(f"import fl_bn_site.{what}" for what in OPERATED)
    assert loaded(f"import fl_bn.cli.main; {operated}", HEAVY) == []
    assert loaded("import torch", HEAVY)[:1] == ["torch"]  # control


@pytest.mark.slow
def test_a_run_imports_nothing_that_its_rounds_do_not_need() -> None:
    unneeded = ("torch._dynamo", "sklearn", "matplotlib", "ray", "torchvision", "pandas", "scipy.stats", "tensorboard")
    run = f"from fl_bn.cli.main import run\nrun({ROUND_1!r})"
    assert loaded(run, (*unneeded, "fl_bn.flower")) == ["fl_bn.flower"]


WHOLE = {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-3}


@listed(
    ("ours", "theirs", "options"),
    [
        (SGD, optim.SGD, {"lr": 0.1}),
        (SGD, optim.SGD, WHOLE),
        (partial(SGD, foreach=True), optim.SGD, WHOLE),  # as clients make it
        (Adam, optim.Adam, {"lr": 0.01, "weight_decay": 1e-3}),
    ],
)
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
