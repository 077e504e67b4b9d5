"""Random keys and values of the run config: a sentence or a training, never a traceback, never a success without training."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from fl_bn.flower import RunFailed
from fl_bn.run.config import ConfigError
from tests.hostile.liars import LOGGER
from tests.listed import listed
from tools.hostile.run_configs import BAD, GOOD, Case, base, cases, parsed, ran, some_config


def bad(found: list[Case]) -> list[Case]:
    return [case for case in found if case.outcome in BAD]


def test_no_config_is_read_with_a_traceback() -> None:
    rng = random.Random(7)
    found = [parsed(some_config(rng, tame=False)) for _ in range(600)]
    assert bad(found) == []
    counts = Counter(case.outcome for case in found)
    assert min(counts["refused"], counts["accepted"]) > 60, counts  # control: the fuzzer finds both


def test_runs_of_random_configs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    """A few here, and more in the slow test below."""
    found = list(cases(15, 1, tmp_path))
    assert bad(found) == []
    counts = Counter(case.outcome for case in found)
    assert min(counts["refused"], counts["trained"]) > 1, counts


def failing(error: BaseException | None = None, text: str = "") -> Any:
    def run(config: Mapping[str, Any]) -> None:
        if error is not None:
            raise error
        if text:
            LOGGER.error(text)

    return run


@listed(
    "run, outcome",
    [
        (failing(KeyError("x")), "traceback"),
        (failing(ConfigError("")), "traceback"),
        (failing(ConfigError("what to do")), "refused"),
        (failing(RunFailed("what to do")), "failed"),
        (failing(text="client 0 raised:\nTraceback (most recent call last): ..."), "traceback"),
        (failing(), "empty"),
    ],
)
def test_the_fuzzer_tells_outcomes_apart(run: Any, outcome: str, tmp_path: Path) -> None:
    """Controls: what it looks for, it finds."""
    assert ran(base(tmp_path), run).outcome == outcome


def test_the_config_that_all_start_from_trains(tmp_path: Path) -> None:
    assert ran(base(tmp_path)) == Case(base(tmp_path), "trained")
    assert set(GOOD).isdisjoint(BAD)
