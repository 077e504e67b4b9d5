"""Shared by every test: hypothesis without deadlines, one torch thread, seeded generators, a population small enough to check by hand.

The process that only gives tests to workers imports this file, too. What takes long to import is imported where it is used.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from xdist import is_xdist_controller

from tests import costs, listed

if TYPE_CHECKING:
    import numpy as np

    from fl_bn.federation.local import Samples

WHOLE = re.compile(r"^pytestmark = \[?\s*pytest\.mark\.(ray|slow|docker|newest)\b", re.MULTILINE)
"""A file whose tests all have that mark."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--case", action="append", default=[], metavar="TEXT", help="of a test over a list, the cases with TEXT in their name")


def pytest_configure(config: pytest.Config) -> None:
    listed.CHOSEN[:] = config.getoption("--case")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave a file alone whose every test the marker expression leaves out: to import it alone can take ten seconds."""
    if collection_path.suffix != ".py" or not collection_path.name.startswith("test_"):
        return None
    marks = WHOLE.findall(collection_path.read_text())
    return True if any(f"not {mark}" in config.getoption("markexpr") for mark in marks) else None


def pytest_report_header() -> str:
    return f"flwr {version('flwr')}"


def pytest_sessionstart(session: pytest.Session) -> None:
    """Before the first test file is read: what hypothesis is told later, a test that is already made does not know."""
    if is_xdist_controller(session):
        return
    from hypothesis import settings

    settings.register_profile("fl-bn", deadline=None, derandomize=True)  # the first torch call alone takes longer than the default deadline
    settings.load_profile("fl-bn")


@pytest.hookimpl(tryfirst=True)  # before marks choose
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what takes long or must run alone, and put the files that take longest first: no worker begins one when all others are done."""
    for item in costs.long(items):
        item.add_marker("slow")
    for item in items:
        if costs.alone(item):
            item.add_marker("alone")
    items.sort(key=lambda item: costs.place(item.nodeid))


def pytest_collection_finish() -> None:
    """Let the collector of garbage look at what tests make, and no more at all that was loaded before them."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000)


def pytest_sessionfinish() -> None:
    """Commands that ran in this process left objects that Python would not look at in the end; a library takes these for leaks."""
    gc.unfreeze()


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Sums are then made in one order, on every machine."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session", autouse=True)
def identity() -> None:
    """Tests make messages, for which later versions of Flower want to know in whose name."""
    from fl_bn.flower.compat import identify

    identify(1)


@pytest.fixture
def rng() -> np.random.Generator:
    import numpy as np

    return np.random.default_rng(20240229)


@pytest.fixture
def tiny_clients() -> Callable[..., list[Samples]]:
    """``tiny_clients(sizes, skew, size, seed)``: one ``Samples`` per entry of ``sizes``; with ``skew`` > 0 each brighter than the last."""
    from tests.federation import random_samples

    def make(sizes: tuple[int, ...] = (3, 7, 5), skew: float = 1.0, size: int = 8, seed: int = 0) -> list[Samples]:
        return [random_samples(n, size=size, brightness=skew * i / max(1, len(sizes) - 1), seed=seed + i) for i, n in enumerate(sizes)]

    return make
