"""Shared by every test: hypothesis without deadlines, one torch thread, seeded generators, a population small enough to check by hand."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import settings

from fl_bn.federation.local import Samples
from fl_bn.flower.compat import identify
from tests import listed
from tests.federation import random_samples

settings.register_profile("fl-bn", deadline=None, derandomize=True)  # the first torch call alone takes longer than the default deadline
settings.load_profile("fl-bn")

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


def pytest_sessionfinish() -> None:
    """Commands that ran in this process left objects that Python would not look at in the end; a library takes these for leaks."""
    gc.unfreeze()


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Sums are then made in one order, on every machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session", autouse=True)
def identity() -> None:
    """Tests make messages, for which later versions of Flower want to know in whose name."""
    identify(1)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(20240229)


@pytest.fixture
def tiny_clients() -> Callable[..., list[Samples]]:
    """``tiny_clients(sizes, skew, size, seed)``: one ``Samples`` per entry of ``sizes``; with ``skew`` > 0 each brighter than the last."""

    def make(sizes: tuple[int, ...] = (3, 7, 5), skew: float = 1.0, size: int = 8, seed: int = 0) -> list[Samples]:
        return [random_samples(n, size=size, brightness=skew * i / max(1, len(sizes) - 1), seed=seed + i) for i, n in enumerate(sizes)]

    return make
