"""A run that was stopped and gone on with is the run itself, bit for bit, whatever it was and wherever it stopped."""

from __future__ import annotations

import os
import re
import shutil
import signal
import time
import tomllib
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import pytest

from fl_bn.app.checkpoints import FREE, run_to_resume
from fl_bn.methods import METHODS
from tests.experiment.inside import command, config, durable, refusing, said
from tests.experiment.resuming import ROUNDS, Values, ends_with, in_pieces, results, run, small_run, stopped
from tests.integration.runs import differences
from tests.listed import COMMON, listed, slow

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
    "robust, mimic": {"method": "fedavg", "attack": "mimic", **BYZANTINE},
    "hbn, a few": {"method": "hbn", "clients": 5, "fraction": 0.5},
}  # fmt: skip
Whole = Callable[[str], dict[str, bytes]]
ALIKE = {*METHODS} - {*COMMON} | {"server adam", "moon, adam, hbn, secure", "accelerated"}
"""Cases that keep the same kinds of tensors in the same places as others."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """The results of a case that nobody stopped, and that made no checkpoints either."""

    @lru_cache
    def made(case: str) -> dict[str, bytes]:
        return results(run(small_run(tmp_path_factory.mktemp("whole"), **CASES[case], checkpoint_every=0)))

    return made


@pytest.mark.sample("[hbn]", "few of", "moon, yogi")
@pytest.mark.parametrize("case", [slow(case) if case in ALIKE else case for case in CASES])
def test_a_run_in_pieces_is_the_run_itself(case: str, tmp_path: Path, whole: Whole) -> None:
    """Twice interrupted, once killed and once with its results written; a checkpoint after every round, or every other.

    The folder of a run with a data set of one's own has a colon in its name, without anybody having chosen it.
    """
    number, name = list(CASES).index(case), f'"{case}": [ü]'
    values = small_run(tmp_path / "pieces", **CASES[case], checkpoint_every=1 + number % 2, name=name)
    path = in_pieces(values, [(3, 4), (3, 5), (4, 5)][number // 2 % 3])
    assert differences(whole(case), results(path)) == []
    assert f"rounds.csv {ROUNDS} None" in whole(case)
    assert "failed" not in (path / "summary.md").read_text()
    assert [file.name for file in path.parent.iterdir() if file.is_dir()] == [name]  # and nothing beside it


@listed("number", [8, 10, 11, 16])
def test_a_run_that_dies_before_any_of_its_files_is_written_goes_on(number: int, whole: Whole, tmp_path: Path) -> None:
    """In the middle of a round, when some clients have kept what they keep, and before and after a checkpoint."""
    values = small_run(tmp_path / "pieces", method="fedbn")

    def dies() -> None:
        write, written = durable.write, 0

        def killed(path: Path, data: bytes, mode: int = 0o600) -> None:
            nonlocal written
            written += 1
            if written == number:
                os.kill(os.getpid(), signal.SIGKILL)
            write(path, data, mode)

        durable.write = killed  # type: ignore[assignment]
        run(values)

    ends_with(signal.SIGKILL, dies)
    assert differences(whole("fedbn"), results(run(values, resume="latest"))) == []


@listed("damage", ["flipped", "of another kind"])
def test_in_a_folder_that_was_moved_a_damaged_checkpoint_costs_the_rounds_since_the_one_before_and_no_more(
    damage: str, whole: Whole, tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    values = small_run(tmp_path / "pieces", **CASES["fedbn"])
    path = stopped(values, 4, dies=True).rename(tmp_path / "moved")
    (tmp_path / "linked").symlink_to(path)
    _, newest = sorted((path / "checkpoints").glob("round-*.safetensors"))
    data, state = newest.read_bytes(), next(path.glob("state-*/client-*/round-*"))
    newest.write_bytes(state.read_bytes() if damage == "of another kind" else data[:-1] + bytes([data[-1] ^ 1]))
    assert differences(whole("fedbn"), results(run(values, resume="linked", output=str(tmp_path), name=""))) == []
    assert f"It was renamed to {newest.name}.set-aside-1; trying the checkpoint before it" in log.text
    assert "going on after round 2 of 5" in log.text


# What may differ, and which run goes on


@pytest.fixture
def plain(tmp_path: Path) -> Values:
    return small_run(tmp_path / "runs", method="gn")


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


def test_latest_is_the_newest_unfinished_run_with_this_config(tmp_path: Path, whole: Whole) -> None:
    """A run without a whole checkpoint is named once, and then does not hide an older one."""
    folder = tmp_path / "runs"
    names = {
        "old": {}, "mine": {}, "damaged": {}, "another": {"seed": 1}, "finished": {}, "without checkpoints": {"checkpoint_every": 0}
    }  # fmt: skip
    for age, (name, change) in enumerate(names.items()):
        plain = small_run(folder, method="gn", name=name, **change)  # type: ignore[arg-type]
        path = run(plain) if name == "finished" else stopped(plain, 3)
        for file in (path / "checkpoints").glob("*"):
            file.write_bytes(b"" if name == "damaged" else file.read_bytes())
            os.utime(file, (time.time() - 100 + age,) * 2)
    made = config(small_run(folder, method="gn", name="", resume="latest"))
    with refusing("damaged", "checkpoint"):
        run(made.to_mapping())
    assert run_to_resume(made).name == "mine"
    assert differences(whole("gn"), results(run(made.to_mapping()))) == []
    assert run_to_resume(made).name == "old"  # mine is finished now
    assert run_to_resume(config(made.to_mapping(), seed=1)).name == "another"
    assert run_to_resume(config(made.to_mapping(), name="old")).name == "old"


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
    Path(str(plain["output"]), "half", "environment.json").write_text('{"packages": {"fl-bn": "0.0.7"}}')
    with refusing("resume='half'", "0.0.7"):
        run(plain, resume="half")


# Damage of the folder


OF_SITES = b'dataset = "sites"\nclasses = 2\nchannels = 1\nimage-size = 8\ncheckpoint-every = 1\n'
DAMAGES: list[tuple[str, bytes | None, str]] = [
    ("config.toml", b"method = '\xff\xfe'", "config.toml"),
    ("config.toml", b"", ""),
    ("config.toml", b"from-tomorrow = 1\n", "'from-tomorrow'"),
    ("config.toml", OF_SITES, "SERVER"),
    ("environment.json", b'{"packages": {"fl-bn": "0.0.7"}}', "0.0.7"),
    ("rounds.jsonl", b"[]\n" * 100_000, "rounds.jsonl"),
    ("checkpoints", None, "checkpoint"),
]
"""A file of the run, its content (None: it is gone), and what the error names."""


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stopped(small_run(tmp_path_factory.mktemp("half"), method="fedavg"), 3)


@listed(("file", "content", "about"), DAMAGES)
def test_a_damaged_folder_is_one_sentence(file: str, content: bytes | None, about: str, half: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(half, tmp_path / "run"))
    if content is not None:
        (path / file).write_bytes(content)
    elif (path / file).is_dir():
        shutil.rmtree(path / file)
    else:
        (path / file).unlink()
    result = command("resume", path)
    assert isinstance(result.exception, SystemExit), repr(result.exception)
    assert result.exit_code not in (0, None)
    assert about in said(result)
