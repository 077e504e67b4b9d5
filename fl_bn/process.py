"""What a process that trains sets for itself: CPU threads, and what becomes of freed memory."""

from __future__ import annotations

import ctypes
import os
import sys
from functools import lru_cache

from threadpoolctl import threadpool_limits

THEIRS = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES")  # a user's own settings of the allocator
KEPT = {-3: 1 << 30, -1: (1 << 31) - 1, -2: 64 << 20}  # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD, M_TOP_PAD of malloc.h: bytes


def set_up(threads: int) -> None:
    """CPU threads of this process, torch's and those of the linear algebra under NumPy (robust rules), and ``keep_freed_memory``."""
    import torch  # here, not above: worker processes are started before it is loaded

    torch.set_num_threads(threads)
    _limit_blas(threads)
    keep_freed_memory()


@lru_cache(maxsize=1)
def keep_freed_memory() -> bool:
    """Whether this process keeps the memory that it frees, for its next training step.

    Linux's C library gives large blocks back to the system once they are freed. A step that asks for them again then costs thousands of
    page faults, up to a third of its time (benchmarks/freed_memory.py). Other systems, and an environment with settings of its own, are left
    as they are.
    """
    if sys.platform != "linux" or any(name in os.environ for name in THEIRS):
        return False
    library = ctypes.CDLL(None)
    return hasattr(library, "mallopt") and all(library.mallopt(parameter, value) == 1 for parameter, value in KEPT.items())


@lru_cache(maxsize=1)
def _limit_blas(threads: int) -> None:  # takes milliseconds to find the library
    threadpool_limits(threads, user_api="blas")
