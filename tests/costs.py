"""Which test files take longest, and which tests must run alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

COMMON = ("fedavg", "fixbn", "fedbn", "hbn", "fbn", "fedtan", "gn")
"""Methods that do different things. The others are variants of these, and a test that takes long for each method is slow for them."""

ALONE = ("tests/deployment/", "tests/exchange/", "tests/integration/test_workers.py")
"""Where slow tests start processes that must answer in time: folders and files."""

LONGEST = (
    "tests/loops/test_real_networks.py",
    "tests/own_loop/test_derived_weights.py",
    "tests/experiment/test_display.py",
    "tests/methods/test_composition.py",
    "tests/doors/test_parity.py",
    "tests/training/test_vectorised.py",
    "tests/experiment/test_resume.py",
    "tests/hostile/test_fuzz.py",
    "tests/flower/test_secure_training.py",
    "tests/flower/test_layer_by_layer.py",
    "tests/integration/test_workers.py",
    "tests/experiment/test_kills_at_writes.py",
    "tests/sweeps/test_evidence_page.py",
    "tests/hostile/test_own_app.py",
    "tests/doors/test_federation_workers.py",
    "tests/hostile/test_gate.py",
    "tests/loops/test_frozen.py",
    "tests/hostile/test_one_liar.py",
    "tests/integration/test_in_process.py",
    "tests/hostile/test_exchange_claims.py",
    "tests/hostile/test_lying_in_earlier_rounds.py",
    "tests/flower/test_recovery.py",
    "tests/sweeps/test_experiments.py",
    "tests/hostile/test_lying_server.py",
    "tests/hostile/test_declared.py",
    "tests/examples/test_flower_apps.py",
    "tests/examples/test_quickstart.py",
    "tests/methods/test_objective_oracles.py",
)
"""Files, the longest first: each runs in one worker, so these begin before all others. A wrong order costs time, and nothing else."""

PLACES = {file: place for place, file in enumerate(LONGEST)}


def place(nodeid: str) -> int:
    """Return where the test's file stands among ``LONGEST``; the others are all behind."""
    return PLACES.get(nodeid.partition("::")[0], len(PLACES))


def alone(item: pytest.Item) -> bool:
    """Return whether a test runs with no other beside it: Ray, containers, and the slow ones of ``ALONE``."""
    if any(item.get_closest_marker(mark) for mark in ("ray", "docker")):
        return True
    return item.nodeid.startswith(ALONE) and item.get_closest_marker("slow") is not None


def common_first(methods: Iterable[str]) -> list[Any]:
    """Return the methods as cases of ``parametrize``, all but the common ones as slow tests."""
    return [name if name in COMMON else slow(name) for name in methods]


def slow(*values: Any) -> Any:
    """Return a case of ``parametrize`` as a slow test."""
    return pytest.param(*values, marks=pytest.mark.slow)
