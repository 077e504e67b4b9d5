"""Import torch and Flower faster, by switching garbage collection off during the import."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_gc() -> Iterator[None]:
    """Switch garbage collection off in the ``with`` block, which imports modules.

    The collector ignores all objects that exist at the end of the block, for as long as they exist.

    Importing torch and Flower makes a quarter of a million objects that live as long as the process. The
    collector would scan all of them many times, and once more when Python ends: together almost a second
    (benchmarks/README.md, "Throughput").
    """
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was:
            gc.enable()
