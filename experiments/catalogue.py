"""The papers' tables and figures: sweep files in ``experiments/definitions/``, one each, named by paper and table or figure.

Beside a sweep's own tables such a file has

    [experiment]
    paper = "FixBN"
    program = "programs/normalisation_error.py:run"    # instead of a sweep: a function of folder, and of small, variant, data, jobs
"""

from __future__ import annotations

import csv
import importlib.util
import inspect
import sys
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from experiments.claims import FILE
from fl_bn.data.dataset import DataNotFound
from fl_bn.run.assembly import limit_threads
from fl_bn.run.config import ConfigError
from fl_bn.sweep.cells import Cell
from fl_bn.sweep.file import PAPER, read

FOLDER = Path(__file__).parent / "definitions"
COLUMNS = ("finished", "experiment", "variant", "seconds", "failed", "folder")


@dataclass(frozen=True)
class Experiment:
    """One table or figure. ``program``: "file:function", the file beside the experiment's own, where it is no sweep."""

    name: str
    file: Path
    paper: str
    title: str
    variants: tuple[str, ...]
    program: str = ""

    def has(self, variant: str) -> bool:
        """The paper's own settings are there without a variant, too."""
        return variant in ("", PAPER, *self.variants)


def find(names: Sequence[str] = ("all",), folder: Path = FOLDER) -> list[Experiment]:
    """The experiments of these names, in order; ``all`` are all, and a paper's number (``003``) all of it.

    Raises:
        ConfigError: a name is unknown, or the folder is not there.
    """
    files = sorted(file for file in folder.glob("*.toml") if file.name != FILE)
    if not files:
        raise ConfigError(f"there are no experiments in {folder}: install fl-bn again")
    known = [_read(file) for file in files]
    for name in names:
        if not any(_is_named(e, name) for e in known):
            raise ConfigError(f"there is no experiment {name!r}; there are: {', '.join(e.name for e in known)}")
    return [e for e in known if any(_is_named(e, name) for name in names)]


def _is_named(experiment: Experiment, name: str) -> bool:
    """Whether ``name`` is the experiment's, that of its paper (``003``; of ours, ``own``), or ``all``."""
    return name == "all" or name.lower() in (experiment.name.lower(), experiment.name.partition("-")[0])


def perform_program(experiment: Experiment, variant: str, data: str, folder: Path, jobs: int = 1) -> None:
    """Call the experiment's function with ``folder``, and those of ``small``, ``variant``, ``data`` and ``jobs`` that it takes, by name.

    Unless its result is there.

    Raises:
        ConfigError: the variant is unknown, the data are not there, or a file cannot be read or written.
    """
    if not experiment.has(variant):
        raise ConfigError(f"{experiment.name} has no variant {variant!r}; it has: {', '.join(experiment.variants)}")
    if (folder / "report.html").exists():
        return
    from fl_bn.report import write_program_report

    called = program_of(experiment)
    folder.mkdir(parents=True, exist_ok=True)
    limit_threads(1)  # small matrices: more threads wait for each other
    known: dict[str, Any] = {"small": variant == "small", "variant": variant, "data": data, "jobs": jobs}
    try:
        called(folder, **{name: value for name, value in known.items() if name in inspect.signature(called).parameters})
    except (DataNotFound, OSError) as error:
        raise ConfigError(f"{experiment.name}: {error}") from error
    write_program_report(folder, experiment.file)


@dataclass(frozen=True)
class Study:
    """A program whose runs are cells. ``plan(folder, variant, data)`` makes them, or the experiment's sweep; ``measured(cell)``: what a
    finished one has, by way. ``axis``: the name of what the ways differ in."""

    plan: Callable[[Path, str, str], list[Cell]]
    axis: str
    ways: Sequence[str]
    measured: Callable[[Cell], Mapping[str, float]]


def study(experiment: Experiment, measure: str = "") -> Study:
    """Of the experiment's program: ``plan``, ``AXIS``, ``WAYS``, ``measured`` in its file; or of the program ``measure`` on its own runs.

    Raises:
        ConfigError: the file has none of these.
    """
    module = _module(replace(experiment, program=measure or experiment.program))

    def swept(folder: Path, variant: str, data: str) -> list[Cell]:
        return read(experiment.file, variant, data).cells(folder)

    try:
        return Study(module.plan if experiment.program else swept, module.AXIS, module.WAYS, module.measured)
    except AttributeError as error:
        raise ConfigError(f"{experiment.file}: its program keeps no results to commit: {error}") from error


def program_of(experiment: Experiment) -> Callable[..., Any]:
    """The function of a file in ``programs/`` beside the experiment's. Raises ConfigError."""
    file, _, name = experiment.program.partition(":")
    found = getattr(_module(experiment), name, None)
    if not callable(found):
        raise ConfigError(f"{experiment.file}: {file} has no function {name!r}")
    return found  # type: ignore[no-any-return]


def _module(experiment: Experiment) -> ModuleType:
    file, _, _ = experiment.program.partition(":")
    path, folder = (experiment.file.parent / file).resolve(), (experiment.file.parent / "programs").resolve()
    if path.parent != folder or path.suffix != ".py" or not path.is_file():
        raise ConfigError(f"{experiment.file}: program must be programs/FILE.py:FUNCTION in {folder}, but is {experiment.program!r}")
    spec = importlib.util.spec_from_file_location(f"experiments.definitions.programs.{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules.get(spec.name) or importlib.util.module_from_spec(spec)
    if spec.name not in sys.modules:
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    return module


class Log:
    """What was run and how long it took: one line per experiment and call."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            path.write_text(",".join(COLUMNS) + "\n")

    def add(self, name: str, variant: str, seconds: float, errors: Mapping[str, str], folder: Path) -> None:
        with self._path.open("a", newline="") as file:
            row = (time.strftime("%Y-%m-%d %H:%M:%S"), name, variant or "full", f"{seconds:.0f}", len(errors), folder.name)
            csv.writer(file).writerow(row)


def _read(file: Path) -> Experiment:
    try:
        tables = tomllib.loads(file.read_text(encoding="utf-8"))
        about = tables["experiment"]
        variants = tuple(about.get("variants", tables.get("variants", {})))
        return Experiment(file.stem, file, about["paper"], tables["title"], variants, about.get("program", ""))
    except (tomllib.TOMLDecodeError, KeyError) as error:
        raise ConfigError(f"{file}: an experiment needs a title and [experiment] with its paper: {error}") from error
