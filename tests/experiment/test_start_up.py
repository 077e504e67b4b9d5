"""What a command imports, and that the optimisers which import less have torch's bits."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn, optim

from fl_bn.federation.optimizers import SGD, Adam
from tests.listed import listed

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "flwr", "ray", "numpy", "scipy", "sklearn", "matplotlib", "torchvision", "pandas")


def loaded(program: str) -> list[str]:
    """Which of ``HEAVY`` a fresh interpreter has loaded after ``program``."""
    ask = f"{program}\nimport json, sys\nprint(json.dumps([name for name in {HEAVY!r} if name in sys.modules]))"
    done = subprocess.run([sys.executable, "-c", ask], cwd=ROOT, capture_output=True, text=True, check=True, timeout=200)
    found: list[str] = json.loads(done.stdout.splitlines()[-1])
    return found


OPERATED = ("kit", "membership", "supervisor", "status", "launch", "runs", "control", "doctor", "verify")


def test_what_is_typed_imports_neither_torch_nor_flower() -> None:
    """A server's `fl-bn start` stays in memory for months: 60 MB, where torch would make it 600."""
    operated = "; ".join(f"import fl_bn_site.{what}" for what in OPERATED)
    assert loaded(f"import fl_bn.cli.main; {operated}") == []
    assert loaded("import numpy") == ["numpy"]  # control


WHOLE = {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-3}


@listed(
    ("ours", "theirs", "options"),
    [
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
