"""A process that trains keeps the memory that it frees, unless its environment has settings of its own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from fl_bn.process import THEIRS

FAULTS = """
import resource, sys
from fl_bn.process import keep_freed_memory
kept = len(sys.argv) > 1 and keep_freed_memory()
import torch
torch.full((8 << 20,), 1.0)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    torch.full((8 << 20,), 1.0)
print(int(kept), resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="of Linux's C library")


def faults(*arguments: str, **variables: str) -> tuple[bool, int]:
    """Whether the process kept its memory, and its page faults while it makes and frees 32 MiB twenty times."""
    environment = {name: value for name, value in os.environ.items() if name not in THEIRS} | variables
    command = [sys.executable, "-c", FAULTS, *arguments]
    kept, count = subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout.split()
    return bool(int(kept)), int(count)


def test_freed_memory_is_used_again_without_page_faults() -> None:
    """Controls: without the setting every tensor costs its pages anew; so it does where the environment has settings of its own."""
    kept, few = faults("keep")
    assert kept
    given_back, many = faults()
    assert not given_back
    assert few < many / 4
    assert faults("keep", MALLOC_TRIM_THRESHOLD_="131072")[0] is False
