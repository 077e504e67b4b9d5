"""Imports of torch and Flower, quick."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_gc() -> Iterator[None]:
    """Collect no garbage while modules are loaded, and never look at them again, not at the end either.

    Loading torch and Flower makes a quarter of a million objects that live as long as the process. The collector would look at all of
    them time and again, and once more when Python ends: together almost a second (benchmarks/README.md, "Throughput").
    """
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was:
            gc.enable()
