"""Set up all tests: hypothesis without deadlines, one torch thread, seeded generators, and a few small clients.

The controller of pytest-xdist, which runs no tests itself, imports this file, too. So modules whose import takes long are imported
inside the functions that need them.
"""

from __future__ import annotations

import gc
import logging
import os
import re
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from xdist import is_xdist_controller

from tests import listed

if TYPE_CHECKING:
    import numpy as np

    from fl_bn.federation.local import Samples

WHOLE = re.compile(r"^pytestmark = \[?\s*pytest\.mark\.(ray|slow|docker|newest)\b", re.MULTILINE)
"""Matches a test file whose tests all have one of these marks."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--case", action="append", default=[], metavar="TEXT", help="of a test over a list, the cases with TEXT in their name")
    parser.addoption("--method", action="append", default=[], metavar="NAME", help="all cases of a method in tests of every method")


def pytest_configure(config: pytest.Config) -> None:
    listed.CHOSEN[:] = config.getoption("--case")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip a test file if the marker expression excludes all its tests, because the import alone can take ten seconds."""
    if collection_path.suffix != ".py" or not collection_path.name.startswith("test_"):
        return None
    marks = WHOLE.findall(collection_path.read_text())
    return True if any(f"not {mark}" in config.getoption("markexpr") for mark in marks) else None


def pytest_report_header() -> str:
    return f"flwr {version('flwr')}"


def pytest_sessionstart(session: pytest.Session) -> None:
    """Set hypothesis's options before the first test file is imported. They have no effect on tests that exist already."""
    if is_xdist_controller(session):
        return
    from hypothesis import settings

    settings.register_profile("fl-bn", deadline=None, derandomize=True)  # the first torch call alone takes longer than the default deadline
    settings.load_profile("fl-bn")
    from fl_bn.federation.engines.vectorised import PURE

    PURE.add("tests")  # networks and losses of tests only compute


@pytest.hookimpl(tryfirst=True)  # before marks choose
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Let ``--method`` choose, or mark what a sample leaves out, and tests with Ray or containers, which run alone."""
    if chosen := config.getoption("--method"):
        items[:] = [item for item in items if of_method(item) in chosen]
        for item in items:  # also those that are slow for a method beside the common ones
            item.own_markers = [mark for mark in item.own_markers if mark.name != "slow"]
        return
    listed.thin_out(items)
    for item in items:
        if item.get_closest_marker("ray") or item.get_closest_marker("docker"):
            item.add_marker("alone")


def of_method(item: pytest.Item) -> str | None:
    """Return the method that a case of a test of every method is about; None for other tests."""
    parameters = getattr(getattr(item, "callspec", None), "params", {})
    return parameters.get("method_name")


def pytest_collection_finish() -> None:
    """Exclude everything that was loaded before the tests from garbage collection, which then takes less time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000)


def pytest_sessionfinish() -> None:
    """Let Python collect all garbage again, because a library reports objects that are left at the end as leaks."""
    gc.unfreeze()


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Let torch use one thread, so that it adds numbers in the same order on every machine."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session", autouse=True)
def quick() -> Iterator[None]:
    """Leave out what takes time and changes no result: to wait for the disk, and to keep a stack trace per seed until CUDA starts."""
    import torch

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda file: None)
        if not torch.cuda.is_available():
            patch.setattr(torch, "manual_seed", torch.default_generator.manual_seed)
        yield


@pytest.fixture(scope="session", autouse=True)
def identity() -> None:
    """Allow this process to make Flower messages, in the name of run 1; later versions of Flower require such an identity."""
    from fl_bn.flower.compat import identify

    identify(1)


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    """Capture the messages of Flower's logger, which do not reach the root logger by default."""
    from fl_bn.flower.compat import LOGGER

    monkeypatch.setattr(LOGGER, "propagate", True)
    caplog.set_level(logging.INFO, logger=LOGGER.name)
    return caplog


@pytest.fixture
def rng() -> np.random.Generator:
    import numpy as np

    return np.random.default_rng(20240229)


@pytest.fixture
def tiny_clients() -> Callable[..., list[Samples]]:
    """Return a function ``make(sizes, skew, size, seed)`` that makes the samples of clients.

    Client i has ``sizes[i]`` random images of ``size`` x ``size`` pixels. With ``skew`` > 0, each client's images are brighter than those
    of the client before.
    """
    from tests.federation import random_samples

    def make(sizes: tuple[int, ...] = (3, 7, 5), skew: float = 1.0, size: int = 8, seed: int = 0) -> list[Samples]:
        return [random_samples(n, size=size, brightness=skew * i / max(1, len(sizes) - 1), seed=seed + i) for i, n in enumerate(sizes)]

    return make
