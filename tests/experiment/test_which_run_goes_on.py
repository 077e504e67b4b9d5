"""Which run ``resume`` means, what may differ from it, and that nobody else is at it; folders that no run leaves."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from fl_bn.flower import RunFailed
from fl_bn.run.checkpoints import FREE, run_to_resume
from fl_bn.run.run_directory import LOCK
from tests.experiment.inside import RoundRecord, RunDirectory, command, config, ends_with_a_sentence, refusing
from tests.experiment.resuming import ROUNDS, Values, results, run, small_run, stopped
from tests.integration.runs import differences


@pytest.fixture
def values(tmp_path: Path) -> Values:
    return small_run(tmp_path / "runs", method="gn")


# What may differ


def test_whatever_decides_a_number_must_be_as_it_was_and_the_rest_may_be_otherwise(values: Values) -> None:
    """For every key of the run config, by changing it in the folder of the stopped run."""
    path = stopped(values, 2)
    made, text = config({**values, "resume": "run"}), (path / "config.toml").read_text()
    assert run_to_resume(made) == path.resolve()  # control
    for name, was in tomllib.loads(text).items():
        other = '"another"' if isinstance(was, str) else str(not was).lower() if isinstance(was, bool) else f"{was + 1}"
        (path / "config.toml").write_text(re.sub(rf"(?m)^{name} = .*$", f"{name} = {other}", text))
        if name in FREE or name in made.without_effect:
            assert run_to_resume(made) == path.resolve()
        else:
            with refusing(f"{name} was {tomllib.loads(f'x = {other}')['x']!r}, and is {made[name]!r}"):
                run_to_resume(made)


def test_a_run_goes_on_under_other_conditions_with_the_same_results(values: Values, tmp_path: Path) -> None:
    whole = results(run(small_run(tmp_path / "whole", method="gn")))
    files = sorted(file.name for file in stopped(values, 4).iterdir())
    for resume in ("run", "latest"):
        with refusing("learning-rate", "seed"):
            run(values, resume=resume, seed=1, learning_rate=0.1)
    assert sorted(file.name for file in Path(str(values["output"]), "run").iterdir()) == files  # what is refused leaves no trace
    others = {"min_replies": 0.9, "min_cohort": 2, "round_timeout": 99.0, "wait_timeout": 9.0, "max_failed_rounds": 1}
    assert differences(whole, results(run(values, resume="run", checkpoint_every=2, **others))) == []


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
    made = config(small_run(folder, method="gn", name="", resume="latest"))
    assert run_to_resume(made).name == "mine"
    assert differences(whole, results(run(small_run(folder, method="gn", name=""), resume="latest"))) == []
    assert run_to_resume(made).name == "old"  # mine is finished now
    assert run_to_resume(config(made.to_mapping(), seed=1)).name == "another"
    assert run_to_resume(config(made.to_mapping(), name="old")).name == "old"
    with refusing("another", "seed"):
        run_to_resume(config(made.to_mapping(), seed=2))


def test_where_there_is_nothing_to_go_on_with_the_runs_that_could_be_are_named(values: Values) -> None:
    stopped(values, 1)  # before its first checkpoint
    for resume in ("latest", "run"):
        with refusing(f"resume='{resume}'", "checkpoint-every"):
            run(values, resume=resume)
    run(values, name="done")
    stopped(values | {"name": "half"}, 3)
    for name in ("done", "nobody"):
        with refusing(f"resume={name!r}", "half"):
            run(values, resume=name)


def test_a_finished_run_keeps_nothing_to_go_on_with_and_a_stopped_one_two_checkpoints(tmp_path: Path) -> None:
    path = run(small_run(tmp_path / "runs", method="fedbn"))
    assert sorted(file.name for file in path.iterdir()) == [
        "clients", "clients.csv", "config.toml", "disclosure.csv", "environment.json", "model.safetensors", "rounds.csv", "rounds.jsonl",
        "run.log", "summary.md",
    ]  # fmt: skip
    path = stopped(small_run(tmp_path / "stopped", method="fedbn"), ROUNDS)
    assert sorted(file.name for file in (path / "checkpoints").iterdir()) == ["round-000003.safetensors", "round-000004.safetensors"]
    assert len(list(path.glob("state-*/client-*"))) == 3
    assert "**The run failed** after 5 of 5 rounds: Stopped" in (path / "summary.md").read_text()


@pytest.mark.parametrize("name", ["a:b", 'a "quoted" name', "ünlü", "[x]", "x" * 220])
def test_whatever_a_run_is_called_it_goes_on_and_clears_up_after_itself(name: str, tmp_path: Path) -> None:
    """The folder of a run with a data set of one's own has a colon in its name, without anybody having chosen it."""
    whole = results(run(small_run(tmp_path / "whole", method="fedbn")))
    values = small_run(tmp_path / "runs", method="fedbn", name=name)
    stopped(values, 4)
    path = run(values, resume=name)
    assert differences(whole, results(path)) == []
    assert [entry.name for entry in path.parent.iterdir() if entry.is_dir()] == [name]


# Damage


def every_checkpoint(damage: Callable[[bytes], bytes], path: Path) -> None:
    for file in (path / "checkpoints").iterdir():
        file.write_bytes(damage(file.read_bytes()))


def test_where_every_checkpoint_is_damaged_that_is_said_as_often_as_one_asks(values: Values) -> None:
    path = stopped(values, 4)
    every_checkpoint(lambda data: data[:-9], path)
    for resume in ("run", "run", "latest"):
        with refusing("checkpoint", path.name):
            run(values, resume=resume)
    assert len(list((path / "checkpoints").glob("*.set-aside-1"))) == 2


def test_a_run_without_a_whole_checkpoint_does_not_hide_an_older_one_that_has(tmp_path: Path) -> None:
    whole = results(run(small_run(tmp_path / "whole", method="gn")))
    values = small_run(tmp_path / "runs", method="gn")
    stopped(values | {"name": "older"}, 3)
    every_checkpoint(lambda data: b"", stopped(values | {"name": "newer"}, 3))
    with refusing("newer"):  # said once,
        run(values, name="", resume="latest")
    found = run(values, name="", resume="latest")  # and done with
    assert found.name == "older"
    assert differences(whole, results(found)) == []


def of_another_version(run: Path) -> None:
    environment = json.loads((run / "environment.json").read_text())
    environment["packages"]["fl-bn"] = "0.0.7"
    (run / "environment.json").write_text(json.dumps(environment))


OF_SITES = 'dataset = "sites"\nclasses = 2\nchannels = 1\nimage-size = 8\ncheckpoint-every = 1\n'
DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "config.toml not UTF-8": (lambda run: (run / "config.toml").write_bytes(b"method = '\xff\xfe'"), "config.toml"),
    "config.toml nested": (lambda run: (run / "config.toml").write_text("a = " + "[" * 5000 + "]" * 5000), "config.toml"),
    "config.toml with a long number": (lambda run: (run / "config.toml").write_text("rounds = " + "9" * 6000), "config.toml"),
    "config.toml empty": (lambda run: (run / "config.toml").write_text(""), ""),
    "config.toml missing": (lambda run: (run / "config.toml").unlink(), "config.toml"),
    "a key from tomorrow": (lambda run: (run / "config.toml").write_text("from-tomorrow = 1\n"), "'from-tomorrow'"),
    "another version": (of_another_version, "0.0.7"),
    "a run of sites": (lambda run: (run / "config.toml").write_text(OF_SITES), "SERVER"),
    "rounds.jsonl garbage": (lambda run: (run / "rounds.jsonl").write_bytes(b"\xff{" * 100_000), "rounds.jsonl"),
    "rounds.jsonl of lists": (lambda run: (run / "rounds.jsonl").write_text("[]\n" * 100_000), "rounds.jsonl"),
    "rounds.jsonl nested": (lambda run: (run / "rounds.jsonl").write_text("[" * 100_000), "rounds.jsonl"),
    "rounds.jsonl missing": (lambda run: (run / "rounds.jsonl").unlink(), "rounds.jsonl"),
    "rounds.csv short": (lambda run: (run / "rounds.csv").write_bytes((run / "rounds.csv").read_bytes()[:30]), "rounds.csv"),
    "clients.csv missing": (lambda run: (run / "clients.csv").unlink(), "clients.csv"),
    "no checkpoint": (lambda run: [file.unlink() for file in (run / "checkpoints").iterdir()], "checkpoint"),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_folder_is_one_sentence(kind: str, tmp_path: Path) -> None:
    path, (damage, about) = stopped(small_run(tmp_path, method="fedavg"), 3), DAMAGES[kind]
    damage(path)
    result = command("resume", path)
    assert result.exit_code not in (0, None), result.output
    assert isinstance(result.exception, SystemExit), repr(result.exception)
    assert about in " ".join(result.output.split())


def test_a_folder_of_no_run_and_one_whose_environment_cannot_be_read(tmp_path: Path) -> None:
    """An environment that cannot be read is as one that is not there: the run is from before there was this file."""
    (tmp_path / "empty").mkdir()
    ends_with_a_sentence("resume", tmp_path / "empty", about="config.toml")
    path = stopped(small_run(tmp_path, method="fedavg"), 3)
    (path / "environment.json").write_text("[" * 100_000)
    assert command("resume", path).exit_code == 0
    ends_with_a_sentence("resume", path, about=f"all of its {ROUNDS} rounds are done")


# Nobody else


def test_a_run_that_is_still_running_cannot_be_gone_on_with(values: Values, monkeypatch: pytest.MonkeyPatch) -> None:
    on_round, tried = RunDirectory.on_round, list[str]()

    def interfere(self: RunDirectory, entry: RoundRecord, rounds: int) -> None:
        on_round(self, entry, rounds)
        if entry.round == 3:
            with refusing("another process", by=RunFailed) as told:
                RunDirectory.create(config({**values, "resume": "run"})).__enter__()
            tried.append(str(told.value))

    monkeypatch.setattr(RunDirectory, "on_round", interfere)
    path = run(values)
    assert len(tried) == 1
    assert tried[0].startswith(str(path))
    assert len((path / "rounds.jsonl").read_text().splitlines()) == ROUNDS


HOLD = "import fcntl, sys, time; f = open(sys.argv[1], 'w'); fcntl.flock(f, fcntl.LOCK_EX); print('held', flush=True); time.sleep(60)"


def test_a_dead_process_does_not_hold_its_run(values: Values) -> None:
    path = stopped(values, 3, dies=True)
    assert (path / LOCK).exists()
    with subprocess.Popen([sys.executable, "-c", HOLD, str(path / LOCK)], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        for _ in range(2):
            with refusing("another process", by=RunFailed):
                run(values, resume="run")
        other.kill()
    run(values, resume="run")
    assert not (path / LOCK).exists()
