"""Configs and folders that no run leaves: one sentence, no traceback, no crash."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fl_bn.cli.main import app
from fl_bn.run.config import ConfigError, RunConfig
from tests.experiment.resuming import small_run, stopped
from tests.listed import listed


@pytest.mark.parametrize("key", ["threads", "workers"])
def test_a_count_of_threads_or_processes_has_an_end(key: str) -> None:
    """Of 100,000 threads torch ends with a segmentation fault."""
    for value in (100_000, 1025, 10**30):
        with pytest.raises(ConfigError, match=f"{key} must be .*, but got {value}"):
            RunConfig.from_mapping({key: value})
    assert RunConfig.from_mapping({key: 1024}).to_mapping()[key] == 1024


@listed("name", ["a\u202egnp.exe", "a\u2066b", "a\u200bb", "a\u0085b", "a\x1b[2J", "a\nb", "a\u2028b", "\ufeffa"])
def test_a_name_has_printable_characters_only(name: str) -> None:
    """Right-to-left overrides, characters of no width, controls."""
    with pytest.raises(ConfigError, match="name must be a plain file name of printable|name must be a text without control") as refused:
        RunConfig.from_mapping({"name": name})
    assert str(refused.value).isprintable()


def test_control_a_name_may_be_of_any_language() -> None:
    for name in ("Länge 3", "試行", "опыт-1", "א"):
        assert RunConfig.from_mapping({"name": name}).name == name


Damage = Callable[[Path], object]
DAMAGES: dict[str, Damage] = {
    "config.toml not UTF-8": lambda run: (run / "config.toml").write_bytes(b"method = '\xff\xfe'"),
    "config.toml nested": lambda run: (run / "config.toml").write_text("a = " + "[" * 5000 + "]" * 5000),
    "config.toml with a long number": lambda run: (run / "config.toml").write_text("rounds = " + "9" * 6000),
    "config.toml empty": lambda run: (run / "config.toml").write_text(""),
    "config.toml missing": lambda run: (run / "config.toml").unlink(),
    "rounds.jsonl garbage": lambda run: (run / "rounds.jsonl").write_bytes(b"\xff{" * 100_000),
    "rounds.jsonl of lists": lambda run: (run / "rounds.jsonl").write_text("[]\n" * 100_000),
    "rounds.jsonl nested": lambda run: (run / "rounds.jsonl").write_text("[" * 100_000),
    "rounds.jsonl empty": lambda run: (run / "rounds.jsonl").write_text(""),
    "rounds.jsonl missing": lambda run: (run / "rounds.jsonl").unlink(),
    "clients.csv missing": lambda run: (run / "clients.csv").unlink(),
    "clients.csv garbage": lambda run: (run / "clients.csv").write_bytes(b"\xff\x00\n" * 100_000),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_folder_is_one_sentence(kind: str, tmp_path: Path) -> None:
    run = stopped(small_run(tmp_path, method="fedavg"), 3)
    DAMAGES[kind](run)
    result = CliRunner().invoke(app, ["resume", str(run)])
    assert result.exit_code not in (0, None), result.output
    assert isinstance(result.exception, SystemExit), repr(result.exception)
    assert "Traceback" not in result.output


def test_a_nested_environment_stops_nobody(tmp_path: Path) -> None:
    """As one that is not there: the run is from before there was this file."""
    run = stopped(small_run(tmp_path, method="fedavg"), 3)
    (run / "environment.json").write_text("[" * 100_000)
    result = CliRunner().invoke(app, ["resume", str(run)])
    assert result.exit_code == 0, result.output
