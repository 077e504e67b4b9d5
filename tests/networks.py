"""Small networks whose norm layers are hard to find: none of their tensors has "bn" in its name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class SmallCNN(nn.Sequential):
    """Two convolutions with BatchNorm, dropout, and a linear head, for images (B, 3, 8, 8)."""

    def __init__(self, dropout: float = 0.5) -> None:
        super().__init__(
            nn.Conv2d(3, 4, 3, padding=1, bias=False),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Conv2d(4, 6, 3, padding=1, bias=False),
            nn.BatchNorm2d(6),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Linear(24, 4),
        )


class Block(nn.Module):
    """Compute a residual block; the shortcut's BatchNorm is in an ``nn.Sequential``, as torchvision's ``downsample.1``."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(before, after, 3, stride=2, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(after)
        self.downsample = nn.Sequential(nn.Conv2d(before, after, 1, stride=2, bias=False), nn.BatchNorm2d(after))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.norm(self.first(x)) + self.downsample(x))


class SmallResNet(nn.Module):
    """Stem, two residual blocks, dropout, and a linear head, for images (B, 3, 8, 8)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU())
        self.body = nn.Sequential(Block(4, 6), Block(6, 8))
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.drop(self.body(self.stem(x)).mean((2, 3))))
        return y


class Wired(nn.Module):
    """Call named parts as a function ``forward(parts, *inputs)`` says."""

    def __init__(self, forward: Callable[..., Any], **parts: nn.Module) -> None:
        super().__init__()
        self.wiring = forward
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return self.wiring(self, *inputs, **named)


NETWORKS: dict[str, Callable[[], nn.Module]] = {"cnn": SmallCNN, "resnet": SmallResNet}


def seeded_network(name: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Build a network with reproducible weights. Scales are not 1 and shifts are not 0, so that a test notices if they are lost."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = NETWORKS[name]() if name in NETWORKS else SmallCNN(dropout=0.0)
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                nn.init.uniform_(module.weight, 0.5, 1.5)
                nn.init.uniform_(module.bias, -0.5, 0.5)
    return model.to(dtype)
