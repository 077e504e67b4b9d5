"""Find out whether runs on this machine compute on a GPU, and whether several processes can use it at the same time."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import torch

MPS = Path(tempfile.gettempdir(), "nvidia-mps")
"""The default folder of NVIDIA's Multi-Process Service (MPS); the variable ``CUDA_MPS_PIPE_DIRECTORY`` names another."""


def on_gpu(device: str) -> bool:
    """Return whether a run whose run config has this ``device`` computes on a GPU. For ``auto``: whether there is a GPU."""
    return device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())


def mps_runs() -> bool:
    """Return whether the daemon of NVIDIA's Multi-Process Service runs. With it, processes share a GPU at the same time."""
    return (Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", MPS)) / "control").exists()
