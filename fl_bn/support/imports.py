"""Import torch and Flower faster, by switching garbage collection off during the import."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_gc() -> Iterator[None]:
    """Switch garbage collection off in the ``with`` block, which imports modules.

    Importing torch and Flower makes a quarter of a million objects that live as
    long as the process, which the collector ignores from then on. Scanning them
    takes almost a second (benchmarks/README.md, "Throughput").
    """
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was:
            gc.enable()
