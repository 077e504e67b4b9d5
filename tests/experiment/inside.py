"""Ask the application: through its command line and its run config. Parts without a public name are imported here, in one place."""

# ruff: noqa: F401

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from fl_bn.app.assembly import OwnData, client_samples, dataset, partitions, source_model
from fl_bn.app.centralised import run_centralised
from fl_bn.app.config import ConfigError, RunConfig
from fl_bn.app.former import renewed
from fl_bn.app.overrides import parse_overrides
from fl_bn.app.run_directory import RunDirectory
from fl_bn.bn.conversion import convert
from fl_bn.cli.main import app
from fl_bn.federation.aggregation import Drift
from fl_bn.federation.local import Samples, evaluate
from fl_bn.federation.record import ClientRecord, Disclosure, RoundRecord
from fl_bn.federation.settings import seeded
from fl_bn.support import durable

Keys = Mapping[str, Any]


def kebab(keys: Keys) -> dict[str, Any]:
    """Return keys as a run config has them; ``_`` may stand for ``-``."""
    return {key.replace("_", "-"): value for key, value in keys.items()}


def config(keys: Keys | None = None, /, **more: Any) -> RunConfig:
    """Make a run config; keys of the papers' setup bring it with them."""
    return RunConfig.from_mapping(renewed(kebab({**(keys or {}), **more})))


def override(keys: Keys) -> str:
    """Return keys as ``--run-config`` takes them."""
    return " ".join(f"{key}={str(value).lower() if isinstance(value, bool) else repr(value)}" for key, value in kebab(keys).items())


def command(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def said(result: Result) -> str:
    """Return both streams, without line breaks."""
    return " ".join(result.output.split())


def ends_well(*arguments: object) -> str:
    """Run a command and return what it printed."""
    result = command(*arguments)
    assert result.exit_code == 0, result.output
    return said(result)


def ends_with_a_sentence(*arguments: object, about: str = "") -> str:
    """Check that a command ends with status 2 and one sentence about ``about``, without a traceback. Return what it printed."""
    result = command(*arguments)
    assert result.exit_code == 2, result.output
    assert isinstance(result.exception, SystemExit)
    assert "Traceback" not in result.output
    assert about in said(result)
    return said(result)


@contextmanager
def refusing(*about: str, by: type[Exception] = ConfigError) -> Iterator[pytest.ExceptionInfo[Exception]]:
    """Expect an error that names each of ``about``: a key, a file, a tensor or a client."""
    with pytest.raises(by) as caught:
        yield caught
    assert [name for name in about if name not in str(caught.value)] == [], str(caught.value)


# In a process of its own


ROOT = Path(__file__).parents[2]
COMMAND = (sys.executable, "-c", "from fl_bn.cli.main import app; app()")
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TERM": "xterm-256color", "COLUMNS": "110"}


def in_a_pipe(*args: str, interrupt_at: str = "", folder: Path = ROOT, **environment: str) -> tuple[int, str]:
    """Run fl-bn with its output in a pipe, and send SIGINT after a line with ``interrupt_at``; return exit status and output."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a process would inherit that it is ignored
    process = subprocess.Popen(
        [*COMMAND, *args], cwd=folder, env={**ENVIRONMENT, **environment}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    came = ""
    with process:
        for line in process.stdout or ():
            came += line
            if interrupt_at and interrupt_at in line:
                process.send_signal(signal.SIGINT)
                interrupt_at = ""
    return process.returncode, came
