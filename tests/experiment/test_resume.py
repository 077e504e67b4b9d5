"""A run that was stopped and gone on with is the run itself, bit for bit, whatever it was and wherever it stopped."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
import tomllib
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from fl_bn.federation.optimizers import ServerOptimizer
from fl_bn.flower import BatchNormClient
from fl_bn.methods import METHODS
from fl_bn.run.checkpoints import FREE, run_to_resume
from tests.experiment.inside import command, config, ends_with_a_sentence, refusing
from tests.experiment.resuming import ROUNDS, Stopped, Values, in_pieces, results, run, small_run, stopped
from tests.integration.runs import differences
from tests.listed import COMMON, slow

BYZANTINE = {"clients": 5, "byzantine": 1, "statistics_rule": "nnm+median", "update_rule": "nnm+median"}
CASES: dict[str, Values] = {
    **{name: {"method": name} for name in METHODS},
    "server adam": {"method": "fedbn", "server_optimizer": "fedadam", "server_learning_rate": 0.05},
    "server yogi": {"method": "silobn", "server_optimizer": "fedyogi", "server_learning_rate": 0.05},
    "gradients, server momentum": {
        "method": "fedbn", "update": "gradients", "local_steps": 1, "momentum": 0.9, "server_optimizer": "fedavgm", "server_momentum": 0.5
    },
    "moon, adam, hbn, secure": {
        "method": "hbn", "objective": "moon", "server_optimizer": "fedadam", "server_learning_rate": 0.05, "secure_aggregation": True
    },
    "moon, yogi, fedbn, local momentum": {
        "method": "fedbn", "objective": "moon", "server_optimizer": "fedyogi", "server_learning_rate": 0.05, "maintain_momentum": "local"
    },
    "accelerated": {"method": "hbn", "server_optimizer": "fedacg", "objective": "fedprox"},
    "control variates": {"method": "fedbn", "objective": "scaffold", "momentum": 0.0, "clients": 5, "fraction": 0.4},
    "global momentum": {"method": "fixbn", "maintain_momentum": "global"},
    "a few of the clients": {"method": "fedbn", "clients": 5, "fraction": 0.4, "partition": "dirichlet"},
    "calibrated": {"method": "fbn", "calibrate": 2},
    "robust, gaussian": {"method": "fedavg", "attack": "gaussian", **BYZANTINE},
    "hbn, a few": {"method": "hbn", "clients": 5, "fraction": 0.5},
}  # fmt: skip
Whole = Callable[[str], dict[str, bytes]]
QUICK = {  # the others keep the same kinds of tensors in the same places
    *COMMON, "server yogi", "control variates", "global momentum", "gradients, server momentum",
    "a few of the clients", "moon, yogi, fedbn, local momentum", "calibrated", "robust, gaussian", "hbn, a few",
}  # fmt: skip
SEVERAL = ("fedbn", "server adam", "gradients, server momentum", "a few of the clients")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """The results of a case that nobody stopped, and that made no checkpoints either."""

    @lru_cache
    def made(case: str) -> dict[str, bytes]:
        return results(run(small_run(tmp_path_factory.mktemp("whole"), **CASES[case], checkpoint_every=0)))

    return made


@pytest.mark.sample("[hbn]", "few of", "moon, yogi")
@pytest.mark.parametrize("case", [case if case in QUICK else slow(case) for case in CASES])
def test_a_run_in_pieces_is_the_run_itself(case: str, tmp_path: Path, whole: Whole) -> None:
    """Twice interrupted, once killed and once with its results written; a checkpoint after every round, or every other."""
    number = list(CASES).index(case)
    values = small_run(tmp_path / "pieces", **CASES[case], checkpoint_every=1 + number % 2)
    path = in_pieces(values, [(3, 4), (3, 5), (4, 5)][number // 2 % 3])
    assert differences(whole(case), results(path)) == []
    assert f"rounds.csv {ROUNDS} None" in whole(case)
    assert "failed" not in (path / "summary.md").read_text()
    assert [file.name for file in path.parent.iterdir() if file.is_dir()] == ["run"]  # and nothing beside it


@pytest.mark.sample
@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_wherever_it_stops(case: str, tmp_path: Path, whole: Whole) -> None:
    for stops in ([2], [3], [4], [5], range(2, ROUNDS + 1)):
        values = small_run(tmp_path / f"at-{stops[0]}-{len(stops)}", **CASES[case])
        assert differences(whole(case), results(in_pieces(values, stops))) == [], stops


def test_a_run_that_stops_in_the_middle_of_a_round(whole: Whole, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of three clients have trained and kept what they keep; the third is where it ends."""
    values, compute = small_run(tmp_path / "pieces", method="fedbn"), BatchNormClient.compute

    def stop(self: BatchNormClient, request: Any, pack: Callable[[Any], object]) -> object:
        if self.site.client == 2 and request.header.round == 4:
            raise Stopped
        return compute(self, request, pack)

    with monkeypatch.context() as patch:
        patch.setattr(BatchNormClient, "compute", stop)
        with pytest.raises(Stopped):
            run(values)
    kept = {path.parent.name: path.name for path in sorted((tmp_path / "pieces" / "run").glob("state-*/client-*/round-*"))}
    assert [name.split("-")[1][:6] for name in kept.values()] == ["000004", "000004", "000003"]  # control: so it was
    assert differences(whole("fedbn"), results(run(values, resume="latest"))) == []


# Controls: what a checkpoint holds is needed


def forget_the_optimizer(values: Values, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ServerOptimizer, "restore", lambda self, buffers: None)


def forget_the_clients(values: Values, monkeypatch: pytest.MonkeyPatch) -> None:
    (states,) = Path(str(values["output"]), "run").glob("state-*")
    shutil.rmtree(states)


def forget_one_client(values: Values, monkeypatch: pytest.MonkeyPatch) -> None:
    (state,) = Path(str(values["output"]), "run").glob("state-*/client-1")
    shutil.rmtree(state)


def forget_the_arrays(values: Values, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fl_bn.federation.shared_model.SharedModel.restore", lambda self, tensors, auxiliary: None)


@pytest.mark.sample("server yogi", "[hbn")
@pytest.mark.parametrize(
    ("case", "forget"),
    [
        ("server yogi", forget_the_optimizer),
        ("fedbn", forget_the_clients),
        ("hbn", forget_one_client),
        ("a few of the clients", forget_the_clients),
        ("gn", forget_the_arrays),
    ],
)
def test_without_any_of_it_the_run_would_be_another(
    case: str, forget: Callable[[Values, pytest.MonkeyPatch], None], whole: Whole, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = small_run(tmp_path / "pieces", **CASES[case])
    stopped(values, 4)
    forget(values, monkeypatch)
    other = differences(whole(case), results(run(values, resume="run")))
    assert any(name.startswith("model.safetensors/") and name.endswith(".weight") for name in other)


@pytest.mark.parametrize("case", ["gn", "fixbn"])
def test_methods_without_anything_at_their_clients_need_nothing_there(case: str, tmp_path: Path) -> None:
    assert not list(stopped(small_run(tmp_path / "pieces", **CASES[case]), 4).glob("state-*"))


# Damage


def checkpoints(path: Path) -> list[Path]:
    return sorted((path / "checkpoints").glob("round-*.safetensors"))


@pytest.mark.sample("[fedbn-")
@pytest.mark.parametrize(
    ("case", "damage"), [*((case, "flipped") for case in SEVERAL), *(("fedbn", damage) for damage in ("short", "empty", "of another kind"))]
)
def test_a_damaged_checkpoint_costs_the_rounds_since_the_one_before_and_no_more(
    case: str, damage: str, whole: Whole, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fl_bn.flower.compat.LOGGER.propagate", True)
    values = small_run(tmp_path / "pieces", **CASES[case])
    path = stopped(values, 4, dies=True)
    before, newest = checkpoints(path)
    data = newest.read_bytes()
    state = next(iter(path.glob("state-*/client-*/round-*")), None)
    other = {"short": data[:-1], "empty": b"", "of another kind": state.read_bytes() if state else b"x"}
    newest.write_bytes(other.get(damage, data[:-1] + bytes([data[-1] ^ 1])))
    assert differences(whole(case), results(run(values, resume="latest"))) == []
    assert f"It was renamed to {newest.name}.set-aside-1; trying the checkpoint before it" in caplog.text
    assert "going on after round 2 of 5" in caplog.text
    assert before.name == "round-000002.safetensors"


# Which run goes on, what may differ from it, and that nobody else is at it


@pytest.fixture
def plain(tmp_path: Path) -> Values:
    return small_run(tmp_path / "runs", method="gn")


# What may differ


def test_whatever_decides_a_number_must_be_as_it_was_and_the_rest_may_be_otherwise(plain: Values) -> None:
    """For every key of the run config, by changing it in the folder of the stopped run."""
    path = stopped(plain, 2)
    made, text = config({**plain, "resume": "run"}), (path / "config.toml").read_text()
    assert run_to_resume(made) == path.resolve()  # control
    for name, was in tomllib.loads(text).items():
        other = '"another"' if isinstance(was, str) else str(not was).lower() if isinstance(was, bool) else f"{was + 1}"
        (path / "config.toml").write_text(re.sub(rf"(?m)^{name} = .*$", f"{name} = {other}", text))
        if name in FREE or name in made.without_effect:
            assert run_to_resume(made) == path.resolve()
        else:
            with refusing(f"{name} was {tomllib.loads(f'x = {other}')['x']!r}, and is {made[name]!r}"):
                run_to_resume(made)


def test_a_run_of_an_earlier_version_goes_on_by_today_s_keys(tmp_path: Path) -> None:
    values = small_run(tmp_path, method="fixbn")
    text, whole = (path := stopped(values, 3)).joinpath("config.toml").read_text(), results(run({**values, "name": "whole"}))
    was = re.sub(r"(?m)^setup = .*\n", "", text) + 'hbn-mixing = "learned"\nsecagg-quantization-range = 22\nshare-drift = true\n'
    (path / "config.toml").write_text(was + "server-beta2 = 0.9\n")
    ends_with_a_sentence("resume", path, about="server-beta2")  # control: every run has 0.99 now
    (path / "config.toml").write_text(was + 'diagnostics = "drift"\n')
    assert command("resume", path).exit_code == 0
    (path / "diagnostics.csv").unlink()
    assert differences(whole, results(path)) == []


def test_a_run_goes_on_under_other_conditions_with_the_same_results(plain: Values, tmp_path: Path) -> None:
    whole = results(run(small_run(tmp_path / "whole", method="gn")))
    files = sorted(file.name for file in stopped(plain, 4).iterdir())
    for resume in ("run", "latest"):
        with refusing("learning-rate", "seed"):
            run(plain, resume=resume, seed=1, learning_rate=0.1)
    assert sorted(file.name for file in Path(str(plain["output"]), "run").iterdir()) == files  # what is refused leaves no trace
    others = {"min_replies": 0.9, "min_cohort": 2, "round_timeout": 99.0, "wait_timeout": 9.0, "max_failed_rounds": 1}
    assert differences(whole, results(run(plain, resume="run", checkpoint_every=2, **others))) == []


# Which run


def test_latest_is_the_newest_unfinished_run_with_this_config(tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    whole = results(run(small_run(tmp_path / "whole", method="gn")))
    names = {"old": {}, "mine": {}, "another": {"seed": 1}, "finished": {}, "without checkpoints": {"checkpoint_every": 0}}
    for age, (name, change) in enumerate(names.items()):
        plain = small_run(folder, method="gn", name=name, **change)  # type: ignore[arg-type]
        path = run(plain) if name == "finished" else stopped(plain, 3)
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


def test_where_there_is_nothing_to_go_on_with_the_runs_that_could_be_are_named(plain: Values) -> None:
    stopped(plain, 1)  # before its first checkpoint
    for resume in ("latest", "run"):
        with refusing(f"resume='{resume}'", "checkpoint-every"):
            run(plain, resume=resume)
    run(plain, name="done")
    stopped(plain | {"name": "half"}, 3)
    for name in ("done", "nobody"):
        with refusing(f"resume={name!r}", "half"):
            run(plain, resume=name)


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


@pytest.mark.sample("[a:b", "quoted")
@pytest.mark.parametrize("name", ["a:b", 'a "quoted" name', "ünlü", "[x]", "x" * 220])
def test_whatever_a_run_is_called_it_goes_on_and_clears_up_after_itself(name: str, tmp_path: Path) -> None:
    """The folder of a run with a data set of one's own has a colon in its name, without anybody having chosen it."""
    whole = results(run(small_run(tmp_path / "whole", method="fedbn")))
    plain = small_run(tmp_path / "runs", method="fedbn", name=name)
    stopped(plain, 4)
    path = run(plain, resume=name)
    assert differences(whole, results(path)) == []
    assert [entry.name for entry in path.parent.iterdir() if entry.is_dir()] == [name]


# Damage


def every_checkpoint(damage: Callable[[bytes], bytes], path: Path) -> None:
    for file in (path / "checkpoints").iterdir():
        file.write_bytes(damage(file.read_bytes()))


def test_where_every_checkpoint_is_damaged_that_is_said_as_often_as_one_asks(plain: Values) -> None:
    path = stopped(plain, 4)
    every_checkpoint(lambda data: data[:-9], path)
    for resume in ("run", "run", "latest"):
        with refusing("checkpoint", path.name):
            run(plain, resume=resume)
    assert len(list((path / "checkpoints").glob("*.set-aside-1"))) == 2


def test_a_run_without_a_whole_checkpoint_does_not_hide_an_older_one_that_has(tmp_path: Path) -> None:
    whole = results(run(small_run(tmp_path / "whole", method="gn")))
    plain = small_run(tmp_path / "runs", method="gn")
    stopped(plain | {"name": "older"}, 3)
    every_checkpoint(lambda data: b"", stopped(plain | {"name": "newer"}, 3))
    with refusing("newer"):  # said once,
        run(plain, name="", resume="latest")
    found = run(plain, name="", resume="latest")  # and done with
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


@pytest.mark.sample(3)
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
