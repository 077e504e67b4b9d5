"""Describe the environment of a run: versions of packages, the machine, and the commit of fl-bn."""

from __future__ import annotations

import os
import platform
from typing import Any

import torch

from fl_bn.support.commit import commit
from fl_bn.support.extras import version_of

PACKAGES = ("fl-bn", "flwr", "ray", "torch", "torchvision", "numpy", "grpcio", "safetensors", "scikit-learn")


def environment() -> dict[str, Any]:
    """Return the content of ``environment.json``, which every run writes to its folder."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": platform.processor() or platform.machine(),
        "cpus": os.cpu_count(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "threads": torch.get_num_threads(),
        "packages": {name: version_of(name) for name in PACKAGES},
        "commit": commit(),
    }
