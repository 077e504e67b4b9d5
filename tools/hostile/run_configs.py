"""Run random run configs, and judge how each one ends.

    python -m tools.hostile.run_configs --cases 2000 --seed 0

Runs every config for real on tiny data, in one process, and prints how many ended in which way. A config may be
refused (one sentence before the run), may fail (one sentence after rounds that changed nothing), or may train. It may
not end in a traceback of the server or of a client, hang, or succeed without a round that changed the model.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import signal
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from fl_bn.bn.composed import Unconvertible
from fl_bn.federation.record import RoundRecord
from fl_bn.flower import RunFailed, run_in_process
from fl_bn.flower.compat import LOGGER
from fl_bn.run.assembly import forget
from fl_bn.run.config import ConfigError, RunConfig
from fl_bn.run.environment import environment
from fl_bn.run.run_directory import RunDirectory
from fl_bn.run.usage import Usage
from tests.experiment.small_data import small_config

Values = dict[str, Any]
KEYS = RunConfig.keys()
SENTENCES = (ConfigError, Unconvertible, FileNotFoundError, FileExistsError)  # errors that fl-bn run shows as one line
GOOD, BAD = ("refused", "failed", "trained", "measured"), ("traceback", "empty", "hangs")
PATIENCE = 120  # seconds
TRIES = 20
EXCHANGE_WAITS: Values = {"exchange-timeout": 1.0, "exchange-join-timeout": 1.0}

# Keys whose valid values may take long or connect to other machines: only values that end soon or must be refused are drawn.
TAME: dict[str, list[Any]] = {
    "rounds": [0, 1, 2, 3, -1],
    "clients": [1, 2, 3, 5, 8, 0, -3, 47, 48, 49, 10_000_000],
    "local-steps": [0, 1, 2, -1],
    "local-epochs": [0, 1, -1],
    "batch-size": [2, 3, 8, 1, 0, 10**12],
    "image-size": [0, 1, 4, 8, 9, 16, -1, 4097],
    "moon-projection": [0, 1, 5, -1],
    "threads": [1, 0, -1],
    "round-timeout": [20.0, 0.0, -1.0],
    "wait-timeout": [0.0, 0.1, -1.0],
    "retry-timeout": [0.0, 0.1, -1.0],
    "exchange": ["auto", "local", "replay", "carrier pigeon"],
    "exchange-timeout": [1.0, 0.0],
    "exchange-join-timeout": [1.0, 0.0],
    "exchange-host": ["127.0.0.1", "localhost", "example.org", "", "a b"],
    "exchange-bind": ["", "127.0.0.1", "0.0.0.0", "nowhere"],
    "model": ["mlp", "simple-cnn", "digits-cnn-small", "lenet-cnn-bn", "mnist-mlp", "resnet20", "tests.experiment.resuming:network"],
    "task": [
        "auto",
        "classification",
        "classification-auc",
        "segmentation",
        "regression",
        "multi-label",
        "tests.experiment.resuming:network",
        "no task",
    ],  # fmt: skip
    "dataset": ["npz", "digits", "digits-plain", "sites", "folder", "csv", "pacs", "abide"],
    "output": ["runs", "runs/../runs", "", "/etc/passwd/x", "/proc/x", "/dev/null/x", "x" * 300, "a/b/c"],
    "pictures": [False],
    "callbacks": ["", "os:system", "tests.kept:Kept", "tests.experiment.resuming:network", "nothing"],
    "device": ["cpu", "auto", "cuda", "cuda:99", "tpu"],
    "diagnostics": ["", "drift", "training-loss,drift", "gradients", "nothing"],
}
NUMBERS: dict[type, list[Any]] = {
    int: [0, 1, 2, 3, 4, 7, -1, -2, 10, 30, 31, 2**31, 2**63 - 1, 2**63, -(2**70)],
    float: [
        0.0, 1e-300, 1e-9, 0.01, 0.1, 0.3, 0.5, 0.9, 0.999, 1.0, 1.5, 3, 50.0, 1e9, 1e38, 1e300, -0.1, -1.0, float("inf"), float("nan"),
    ],
}  # fmt: skip
TEXTS = [
    "", " ", "none", "x" * 5000, "\u20ac" * 200, "a\0b", "a\nb", "\ud800", "..", "../..", ".", "-rf", "~", "/", "//", "CON", "%s%n", "{0}",
    "'; --", "0:1", "1:2", "0:1,0:2", "9:9", ":", "1:", "-1:3", "0.5:0.1", "0.5:nan", "0.5:0.1,0.4:1", "nnm+median", "nnm+nnm+median", "+",
    "median+nnm",
    "os:system", "subprocess:run", "builtins:eval", "torch.hub:load", "fl_bn.support.durable:set_aside", "no.such:thing", "a:b:c", ":",
    "tests:",
    "/etc/passwd", "/dev/null", "none.npz", "latest", "a,b", "china", "resnet18x", "deeplabv3plus-", "deeplabv3plus-nothing", "__main__:x",
]  # fmt: skip


@dataclass(frozen=True)
class Case:
    """Hold one run config and how its run ended.

    Attributes:
        values: The run config.
        outcome: One of ``GOOD`` or ``BAD``.
        text: The error message or traceback at the end; empty: there was none.
    """

    values: Values
    outcome: str
    text: str = ""


def choices(name: str) -> list[Any]:
    """Return the values that the key ``name`` allows, where it has a list of them; else an empty list."""
    key = KEYS[name]
    return [part for part in key.shown.split(", ") if type(key.default) is str and key.accepts(part)]


def some_value(name: str, rng: random.Random, tame: bool) -> Any:
    kind = type(KEYS[name].default)
    if rng.random() < 0.06:
        return rng.choice([None, [], {}, b"bytes", "text", 3, 0.5, True, (1, 2)])
    if tame and name in TAME and (rng.random() < 0.85 or kind is not str):
        return rng.choice(TAME[name])
    if kind is bool:
        return rng.random() < 0.5
    if kind is not str:
        return rng.choice([KEYS[name].default, *NUMBERS[kind]])
    listed = choices(name)
    return rng.choice(listed) if listed and rng.random() < 0.8 else rng.choice(TEXTS)


def fitting_value(name: str, rng: random.Random, tame: bool) -> Any:
    """Return a random value that the key accepts. If such a config is refused, the combination of its keys is the reason."""
    for _ in range(TRIES):
        if takes(name, value := some_value(name, rng, tame)):
            return value
    return KEYS[name].default


def takes(name: str, value: Any) -> bool:
    try:
        KEYS[name].check(value)
    except ValueError:
        return False
    return True


def some_config(rng: random.Random, tame: bool = True) -> Values:
    """Return a few keys with random values; in one of 50 configs, also a key that does not exist.

    In half of the configs, each key accepts its value. In the others, a fifth of the values are wrong. One wrong value is
    enough to refuse a config, and its other keys are then not tested.

    Args:
        rng: Draws keys and values.
        tame: Whether to draw mostly values with which a run ends soon.
    """
    values: Values = {}
    draw = fitting_value if rng.random() < 0.5 else some_value
    for _ in range(rng.choice([1, 1, 2, 2, 3, 4, 6])):
        name = rng.choice(list(KEYS))
        values[name] = draw(name, rng, tame)
    if rng.random() < 0.3:
        values["method"] = rng.choice(choices("method"))
    if rng.random() < 0.02:
        values[rng.choice(["", "Rounds", "learning_rate", "\0", "xyzzy", "rounds "])] = 1
    return values


def counting(values: Values, keys: Collection[str]) -> Values:
    """Return ``values`` without those of ``keys`` that have no effect in this run. A run config with such keys is refused."""
    use = Usage()
    with suppress(Exception):  # refused for another reason, which the run reports
        use.config(values)
    return {key: value for key, value in values.items() if key not in use.ignored or key not in keys}


def base(folder: Path) -> Values:
    """Return a config that trains in a fraction of a second, with short waits for methods that exchange."""
    small: Values = {**small_config(folder), "clients": 3, "rounds": 2, "partition": "iid", "method": "fedavg", "pictures": False}
    waits = {"wait-timeout": 0.0, "retry-timeout": 0.0, "round-timeout": 20.0, **EXCHANGE_WAITS}
    return small | waits | {"output": str(folder / "runs")}


class Hangs(BaseException):
    """Signal that a run took longer than ``PATIENCE`` seconds."""


class Listener(logging.Handler):
    """Collect the log messages that have a traceback."""

    def __init__(self) -> None:
        super().__init__()
        self.tracebacks: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info or "Traceback (most recent call last)" in record.getMessage():
            self.tracebacks.append(record.getMessage())


@contextmanager
def observed() -> Iterator[tuple[Listener, list[RoundRecord]]]:
    """Collect logged tracebacks and the record of every round inside the block; raise Hangs after PATIENCE seconds."""
    listener, records, on_round = Listener(), list[RoundRecord](), RunDirectory.on_round
    same = environment()

    def spy(self: RunDirectory, entry: RoundRecord, rounds: int) -> None:
        records.append(entry)
        on_round(self, entry, rounds)

    def late(number: int, frame: FrameType | None) -> None:
        raise Hangs

    before, quiet, shown = signal.signal(signal.SIGALRM, late), LOGGER.propagate, list(LOGGER.handlers)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunDirectory, "on_round", spy)
        patch.setattr("fl_bn.run.run_directory.environment", lambda: same)  # reading the environment takes as long as a round
        LOGGER.handlers[:], LOGGER.propagate = [listener], False
        signal.alarm(PATIENCE)
        try:
            yield listener, records
        finally:
            signal.alarm(0)
            signal.signal(signal.SIGALRM, before)
            LOGGER.handlers[:], LOGGER.propagate = shown, quiet


def parsed(values: Values) -> Case:
    """Read the config and make the objects that it configures, but do not run it. Return the case with its outcome."""
    try:
        config = RunConfig.from_mapping(values)
        config.build_method(), config.local_training(), config.defence(), config.secure(), config.round_policy(), config.to_mapping()
    except ConfigError as error:
        return sentence(values, "refused", error)
    except Exception:  # what is looked for
        return Case(values, "traceback", traceback.format_exc())
    return Case(values, "accepted")


def ran(values: Values, run: Callable[[Mapping[str, Any]], object] = run_in_process) -> Case:
    """Run ``values``. Return the case with its outcome."""
    with observed() as (listener, records):
        try:
            run(RunConfig.from_mapping(counting(values, EXCHANGE_WAITS)).to_mapping())
            outcome, error = well(values, records), None
        except SENTENCES as refused:
            outcome, error = "refused", refused
        except RunFailed as failed:
            outcome, error = "failed", failed
        except Hangs:
            return Case(values, "hangs")
        except Exception:  # what is looked for
            return Case(values, "traceback", traceback.format_exc())
    if listener.tracebacks:
        return Case(values, "traceback", listener.tracebacks[0])
    return Case(values, outcome) if error is None else sentence(values, outcome, error)


def well(values: Values, records: list[RoundRecord]) -> str:
    """Judge a run that ended without an error.

    Returns:
        "trained": a training round changed the model. "measured": the run config has ``rounds=0``, and its statistics pass
        succeeded. "empty": neither happened.
    """
    if any(record.aggregated for record in records if record.phase != "measure"):
        return "trained"
    return "measured" if values.get("rounds") == 0 and any(record.aggregated for record in records) else "empty"


def sentence(values: Values, outcome: str, error: BaseException) -> Case:
    """Return the case that ended with ``error``.

    If the message is empty, overlong or has a traceback, the outcome is "traceback" instead of ``outcome``.
    """
    text = str(error)
    return Case(values, outcome if text.strip() and "Traceback" not in text and len(text) < 3000 else "traceback", text)


def cases(count: int, seed: int, folder: Path) -> Iterator[Case]:
    """Run ``count`` configs in ``folder``, which becomes the working directory."""
    os.chdir(folder)
    for number in range(count):
        rng = random.Random(f"{seed} {number}")
        values = base(folder) | some_config(rng)
        yield ran(counting(values, values) if number % 2 else values)  # otherwise most would be refused for a key without effect
        if number % 50 == 49:
            forget()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no new run after this many seconds")
    told = parser.parse_args()
    counts, begin = Counter[str](), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        small = base(Path(folder))
        for case in cases(told.cases, told.seed, Path(folder)):
            counts[case.outcome] += 1
            if case.outcome in BAD:
                changed = {name: value for name, value in case.values.items() if name not in small or repr(value) != repr(small[name])}
                print(json.dumps({"outcome": case.outcome, "values": changed, "text": case.text[-1500:]}, default=repr), flush=True)
            if time.monotonic() - begin > told.seconds:
                break
        os.chdir("/")
    print(f"{sum(counts.values())} run configs, seed {told.seed}, {time.monotonic() - begin:.0f} s: {dict(counts.most_common())}")


if __name__ == "__main__":
    main()
