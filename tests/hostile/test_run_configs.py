"""Random keys and values of the run config: a sentence or a training, never a traceback, never a success without training."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from fl_bn.flower import RunFailed
from fl_bn.flower.log import LOGGER
from fl_bn.run.config import ConfigError
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


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_many_runs_of_random_configs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert bad(list(cases(120, 2, tmp_path))) == []


def raises(error: BaseException) -> Any:
    def run(config: Mapping[str, Any]) -> None:
        raise error

    return run


def logs(text: str) -> Any:
    return lambda config: LOGGER.error(text)


@listed(
    "run, outcome",
    [
        (raises(KeyError("x")), "traceback"),
        (raises(RuntimeError("x")), "traceback"),
        (raises(ConfigError("")), "traceback"),
        (raises(ConfigError("what to do")), "refused"),
        (raises(RunFailed("what to do")), "failed"),
        (logs("client 0 raised:\nTraceback (most recent call last): ..."), "traceback"),
        (lambda config: None, "empty"),
    ],
)
def test_the_fuzzer_tells_outcomes_apart(run: Any, outcome: str, tmp_path: Path) -> None:
    """Controls: what it looks for, it finds."""
    assert ran(base(tmp_path), run).outcome == outcome


def test_the_config_that_all_start_from_trains(tmp_path: Path) -> None:
    assert ran(base(tmp_path)) == Case(base(tmp_path), "trained")
    assert set(GOOD).isdisjoint(BAD)
