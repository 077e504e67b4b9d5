"""Choose the device on which a run computes, and whether torch uses deterministic kernels on it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch

from fl_bn.flower.compat import federation_config, simulated
from fl_bn.run.config import ConfigError, RunConfig
from fl_bn.run.keys import known_device


def device(config: RunConfig, node: Mapping[str, Any] | None = None) -> torch.device:
    """Return the device that the client's node config names, or else the device that the run config names.

    For a GPU, also set whether this process uses deterministic kernels, as the run config says.

    Args:
        config: The run config.
        node: The node config; None: there is none.

    Raises:
        ConfigError: The node config names something other than a device, or the GPU is one that torch does not see.
    """
    chosen = _device(config, node)
    if chosen.type == "cuda":
        os.environ.setdefault(
            "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
        )  # torch requires it for deterministic kernels; it is read when the GPU is first used
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # takes time, and is needless since nothing here reads uninitialised memory
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
        share = {"num-supernodes": config.clients, "backend.client-resources.num-cpus": 1, "backend.client-resources.num-gpus": 0.2}
        hidden = node is not None and simulated()  # by Ray, which hides the GPUs from clients
        raise ConfigError(
            f"device={name}, but torch sees {seen or 'no'} GPU in this process. "
            + (
                f"Give each client a share of a GPU, by the profile local-simulation-gpu or {federation_config(share)}"
                if hidden
                else "See fl-bn doctor, or take device='auto', which takes a GPU if there is one"
            )
        )
    return chosen
