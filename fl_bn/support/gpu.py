"""Find out whether runs on this machine compute on a GPU."""

from __future__ import annotations

import torch


def on_gpu(device: str) -> bool:
    """Return whether a run whose run config has this ``device`` computes on a GPU. For ``auto``: whether there is a GPU."""
    return device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())
