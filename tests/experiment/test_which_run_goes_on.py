"""Which run ``resume`` means, what may differ from it, and that nobody else is at it: said by name where it cannot be."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
import tomllib
from contextlib import suppress
from pathlib import Path

import pytest

from fl_bn.federation.record import RoundRecord
from fl_bn.flower import RunFailed, run_in_process
from fl_bn.run.checkpoints import FREE, run_to_resume
from fl_bn.run.config import ConfigError, RunConfig
from fl_bn.run.run_directory import LOCK, RunDirectory
from tests.experiment.resuming import ROUNDS, Values, results, run, small_run, stopped
from tests.integration.runs import differences

KEYS = RunConfig.keys()


@pytest.fixture
def values(tmp_path: Path) -> Values:
    return small_run(tmp_path / "runs", method="gn")


def refused(values: Values, **overrides: str | int | float | bool) -> str:
    """What is said to a run that cannot go on."""
    with pytest.raises(ConfigError) as told:
        run(values, **overrides)
    return str(told.value)


# What may differ


def test_whatever_decides_a_number_must_be_as_it_was_and_the_rest_may_be_otherwise(values: Values) -> None:
    """For every key of the run config, by changing it in the folder of the stopped run."""
    path = stopped(values, 2)
    config, text = RunConfig.from_mapping({**values, "resume": "run"}), (path / "config.toml").read_text()
    assert run_to_resume(config) == path.resolve()  # control
    for name in KEYS:
        was = tomllib.loads(text)[name]
        other = '"another"' if isinstance(was, str) else str(not was).lower() if isinstance(was, bool) else f"{was + 1}"
        (path / "config.toml").write_text(re.sub(rf"(?m)^{name} = .*$", f"{name} = {other}", text))
        if name in FREE or name in config.without_effect:
            assert run_to_resume(config) == path.resolve()
        else:
            with pytest.raises(ConfigError) as told:
                run_to_resume(config)
            expected = (
                f"resume='run': that run has another run config: {name} was {tomllib.loads(f'x = {other}')['x']!r}, "
                f"and is {config.to_mapping()[name]!r}."
            )
            assert str(told.value).startswith(expected)


def test_what_may_differ_is_where_and_how_it_runs_not_what() -> None:
    exchange = {name for name in KEYS if name.startswith("exchange")}
    assert FREE - exchange == {
        "name", "output", "resume", "run-signature", "checkpoint-every", "pictures", "callbacks", "device", "threads", "workers",
        "recalibration", "keep-best", "early-stop", "min-sites",
        "deterministic", "memory-format",
        "recalibration-memory", "share-label-counts", "min-replies", "min-cohort",
        "clients-at-start", "client-nodes", "client-names",
        "max-failed-rounds", "round-timeout", "wait-timeout", "retry-timeout",
    }  # fmt: skip


def test_a_run_goes_on_under_other_conditions_with_the_same_results(values: Values, tmp_path: Path) -> None:
    whole = results(run(small_run(tmp_path / "whole", method="gn")))
    stopped(values, 4)
    others = {
        "checkpoint_every": 2,
        "min_replies": 0.9,
        "min_cohort": 2,
        "round_timeout": 99.0,
        "wait_timeout": 9.0,
        "max_failed_rounds": 1,
    }
    assert differences(whole, results(run(values, resume="run", **others))) == []


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"rounds": 9}, "rounds was 5, and is 9"),
        ({"method": "fedbn"}, "method was 'gn', and is 'fedbn'"),
        ({"seed": 1, "learning_rate": 0.1}, "learning-rate was 0.05, and is 0.1, seed was 0, and is 1"),
        ({"precision": "mixed"}, "precision was 'float32', and is 'mixed'"),
    ],
)
def test_another_config_is_refused_with_the_keys_that_differ(change: dict[str, object], told: str, values: Values) -> None:
    before = sorted(file.name for file in stopped(values, 3).iterdir())
    other = "has another run config: "
    for resume, name in (("run", f"resume='run': that run {other}"), ("latest", f"the newest unfinished run, run, {other}")):
        assert f"{name}{told}" in refused(values, resume=resume, **change)  # type: ignore[arg-type]
    assert sorted(file.name for file in Path(str(values["output"]), "run").iterdir()) == before
    run(values, resume="run")  # control


@pytest.mark.parametrize("text", ["", "method = ", "not toml at all"])
def test_a_folder_whose_config_cannot_be_read_is_named(text: str, values: Values) -> None:
    path = stopped(values, 3)
    (path / "config.toml").write_text(text)
    told = refused(values, resume="run")
    assert ("its config.toml cannot be read" in told) if text else ("method was None" in told)


def test_resume_needs_what_the_run_had(values: Values) -> None:
    for missing in ({"checkpoint_every": 0}, {"output": ""}):
        message = refused(values, resume="run", **missing)
        assert "resume needs output and checkpoint-every, with the values of the run that it continues" in message


# Which run


def test_latest_is_the_newest_unfinished_run_with_this_config(tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    whole = results(run(small_run(tmp_path / "whole", method="gn")))
    names = {"old": {}, "mine": {}, "another": {"seed": 1}, "finished": {}, "without checkpoints": {"checkpoint_every": 0}}
    for age, (name, change) in enumerate(names.items()):
        values = small_run(folder, method="gn", name=name, **change)  # type: ignore[arg-type]
        path = run(values) if name == "finished" else stopped(values, 3)
        for file in (path / "checkpoints").glob("*"):
            os.utime(file, (time.time() - 100 + age,) * 2)
    config = RunConfig.from_mapping({**small_run(folder, method="gn", name="", resume="latest")})
    assert run_to_resume(config).name == "mine"
    assert differences(whole, results(run(small_run(folder, method="gn", name=""), resume="latest"))) == []
    assert run_to_resume(config).name == "old"  # mine is finished now
    assert run_to_resume(RunConfig.from_mapping({**config.to_mapping(), "seed": 1})).name == "another"
    assert run_to_resume(RunConfig.from_mapping({**config.to_mapping(), "name": "old"})).name == "old"
    with pytest.raises(ConfigError, match="the newest unfinished run, another, has another run config: seed was 1, and is 2"):
        run_to_resume(RunConfig.from_mapping({**config.to_mapping(), "seed": 2}))


def test_where_there_is_nothing_to_go_on_with_the_runs_that_could_be_are_named(values: Values) -> None:
    assert "resume='latest' found no run to resume among the unfinished runs with checkpoints in" in refused(values, resume="latest")
    assert "none (checkpoint-every makes them)" in refused(values, resume="latest")
    run(values, name="done")
    stopped(values | {"name": "half"}, 3)
    for name in ("done", "nobody"):
        told = refused(values, resume=name)
        assert told.startswith(f"resume={name!r}: ")
        assert re.search(r"has no checkpoint. Choose one of the unfinished runs with checkpoints in .*runs: half$", told)


def test_a_run_that_stopped_before_its_first_checkpoint_has_none(values: Values) -> None:
    stopped(values, 1)
    assert "has no checkpoint" in refused(values, resume="run")
    assert "none (checkpoint-every makes them)" in refused(values, resume="latest")


def test_a_finished_run_keeps_nothing_to_go_on_with(tmp_path: Path) -> None:
    path = run(small_run(tmp_path / "runs", method="fedbn"))
    assert sorted(file.name for file in path.iterdir()) == [
        "clients", "clients.csv", "config.toml", "disclosure.csv", "environment.json", "model.safetensors", "rounds.csv", "rounds.jsonl",
        "run.log", "summary.md",
    ]  # fmt: skip


def test_a_stopped_run_keeps_two_checkpoints_and_its_clients_states(tmp_path: Path) -> None:
    path = stopped(small_run(tmp_path / "runs", method="fedbn"), ROUNDS)
    assert sorted(file.name for file in (path / "checkpoints").iterdir()) == ["round-000003.safetensors", "round-000004.safetensors"]
    assert len(list(path.glob("state-*/client-*"))) == 3
    assert (path / "summary.md").read_text().count("**The run failed** after 5 of 5 rounds: Stopped") == 1


@pytest.mark.parametrize("name", ["a:b", 'a "quoted" name', "ünlü", "[x]", "a&b", "x" * 220])
def test_whatever_a_run_is_called_it_goes_on_and_clears_up_after_itself(name: str, tmp_path: Path) -> None:
    """The folder of a run with a data set of one's own has a colon in its name, without anybody having chosen it."""
    whole = results(run(small_run(tmp_path / "whole", method="fedbn")))
    values = small_run(tmp_path / "runs", method="fedbn", name=name)
    stopped(values, 4)
    path = run(values, resume=name)
    assert differences(whole, results(path)) == []
    assert [entry.name for entry in path.parent.iterdir() if entry.is_dir()] == [name]


@pytest.mark.parametrize("name", ["-x", "~x", ".x", "a\\b", "a\nb"])
def test_a_name_that_clients_would_not_take_is_refused_or_harmless(name: str, tmp_path: Path) -> None:
    """Else its clients' states would be in a folder of another name, which nobody clears away, or the wrong run does."""
    values = small_run(tmp_path / "runs", method="fedbn", name=name)
    with suppress(ConfigError):
        path = run(values)
        assert [entry.name for entry in path.parent.iterdir() if entry.is_dir()] == [name]


# Damage


def test_where_every_checkpoint_is_damaged_that_is_said_as_often_as_one_asks(values: Values) -> None:
    path = stopped(values, 4)
    for file in (path / "checkpoints").iterdir():
        file.write_bytes(file.read_bytes()[:-9])
    assert "run cannot be resumed, since all of its checkpoints are damaged: start the run anew" in refused(values, resume="run")
    for resume in ("run", "latest"):
        told = refused(values, resume=resume)
        assert "checkpoint" in told
        assert str(path.name) in told
    assert len(list((path / "checkpoints").glob("*.set-aside-1"))) == 2


def test_a_run_without_a_whole_checkpoint_does_not_hide_an_older_one_that_has(tmp_path: Path) -> None:
    whole = results(run(small_run(tmp_path / "whole", method="gn")))
    values = small_run(tmp_path / "runs", method="gn")
    stopped(values | {"name": "older"}, 3)
    path = stopped(values | {"name": "newer"}, 3)
    for file in (path / "checkpoints").iterdir():
        file.write_bytes(b"")
    with pytest.raises(ConfigError, match="newer cannot be resumed, since all of its checkpoints are damaged"):  # said once,
        run(values, name="", resume="latest")
    found = run(values, name="", resume="latest")  # and done with
    assert found.name == "older"
    assert differences(whole, results(found)) == []


@pytest.mark.parametrize("file", ["rounds.csv", "clients.csv", "rounds.jsonl"])
def test_files_that_lost_rounds_are_named(file: str, values: Values) -> None:
    path = stopped(values, 4)
    (path / file).write_bytes((path / file).read_bytes()[:30])
    for _ in range(2):
        with pytest.raises(ValueError, match=rf"{file}: the file had \d+ bytes at the checkpoint, but has 30 now"):
            run_in_process({**values, "resume": "run"})


# Nobody else


def test_a_run_that_is_still_running_cannot_be_gone_on_with(values: Values, monkeypatch: pytest.MonkeyPatch) -> None:
    on_round, tried = RunDirectory.on_round, list[str]()

    def interfere(self: RunDirectory, entry: RoundRecord, rounds: int) -> None:
        on_round(self, entry, rounds)
        if entry.round == 3:
            with pytest.raises(RunFailed) as told:
                RunDirectory.create(RunConfig.from_mapping({**values, "resume": "run"})).__enter__()
            tried.append(str(told.value))

    monkeypatch.setattr(RunDirectory, "on_round", interfere)
    path = run(values)
    assert tried == [f"{path} is still being written by another process: wait for the end of that process, or end the process first"]
    assert len((path / "rounds.jsonl").read_text().splitlines()) == ROUNDS


HOLD = "import fcntl, sys, time; f = open(sys.argv[1], 'w'); fcntl.flock(f, fcntl.LOCK_EX); print('held', flush=True); time.sleep(60)"


def test_a_dead_process_does_not_hold_its_run(values: Values) -> None:
    path = stopped(values, 3, dies=True)
    assert (path / LOCK).exists()
    with subprocess.Popen([sys.executable, "-c", HOLD, str(path / LOCK)], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        for _ in range(2):
            with pytest.raises(RunFailed, match="is still being written by another process"):
                run(values, resume="run")
        other.kill()
    run(values, resume="run")
    assert not (path / LOCK).exists()
