"""Choose the device on which a run computes, and whether its kernels are deterministic."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch

from fl_bn.app.config import ConfigError, RunConfig
from fl_bn.app.keys import known_device
from fl_bn.flower.compat import federation_config, simulated


def device(config: RunConfig, node: Mapping[str, Any] | None = None) -> torch.device:
    """Return the device that the client's node config, or else the run config, names.

    For a GPU, set whether this process uses deterministic kernels, as the run
    config says. ``ConfigError``: there is no such device.
    """
    chosen = _device(config, node)
    if chosen.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # torch wants it before deterministic kernels are first used
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # takes time, and nothing reads it
        torch.use_deterministic_algorithms(config.deterministic, warn_only=True)
    return chosen


def _device(config: RunConfig, node: Mapping[str, Any] | None) -> torch.device:
    name = str((node or {}).get("device", "") or config.device)
    if not known_device(name):
        raise ConfigError(f"device must be auto, cpu, cuda or cuda:0 ..., but the node config has {name!r}")
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    chosen, seen = torch.device(name), torch.cuda.device_count()
    if chosen.type == "cuda" and (chosen.index or 0) >= seen:
        todo = "take device='auto', or see fl-bn doctor"
        if node is not None and simulated():  # Ray hides the GPUs from clients
            share = {"num-supernodes": config.clients, "backend.client-resources.num-gpus": 0.2}
            todo = f"give each client a share of a GPU: {federation_config(share)}"
        raise ConfigError(f"device={name}, but torch sees {seen} GPUs in this process: {todo}")
    return chosen
