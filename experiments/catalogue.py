"""Find the papers' tables and figures: one sweep file in ``experiments/definitions/`` for each, named after it.

Beside a sweep's own tables such a file has

    [experiment]
    paper = "FixBN"
    program = "programs/normalisation_error.py:run"    # no sweep: a function of folder, and of small, variant, data, jobs
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
    """Describe one table or figure of a paper.

    Attributes:
        name: Its name, the file's without suffix.
        file: Its sweep file.
        paper: The paper's name.
        title: What it shows.
        variants: The variants of the file.
        program: "file:function" for an experiment that is no sweep; the file is beside the experiment's own.
    """

    name: str
    file: Path
    paper: str
    title: str
    variants: tuple[str, ...]
    program: str = ""

    def has(self, variant: str) -> bool:
        """Tell whether there is such a variant; the paper's own settings need no variant in the file."""
        return variant in ("", PAPER, *self.variants)


def find(names: Sequence[str] = ("all",), folder: Path = FOLDER) -> list[Experiment]:
    """Find the experiments of these names, in order.

    Args:
        names: Names; ``all`` stands for all, and a paper's number (``003``) for all of that paper.
        folder: The folder of the sweep files.

    Raises:
        ConfigError: A name is unknown, or the folder is missing.
    """
    files = sorted(file for file in folder.glob("*.toml") if file.name != FILE)
    if not files:
        raise ConfigError(f"there are no experiments in {folder}: run this in a checkout of fl-bn's repository")
    known = [_read(file) for file in files]
    for name in names:
        if not any(_is_named(e, name) for e in known):
            raise ConfigError(f"there is no experiment {name!r}: choose one of {', '.join(e.name for e in known)}")
    return [e for e in known if any(_is_named(e, name) for name in names)]


def _is_named(experiment: Experiment, name: str) -> bool:
    """Tell whether ``name`` is the experiment's, that of its paper (``003``; ``own`` for ours), or ``all``."""
    return name == "all" or name.lower() in (experiment.name.lower(), experiment.name.partition("-")[0])


def perform_program(experiment: Experiment, variant: str, data: str, folder: Path, jobs: int = 1) -> None:
    """Call the experiment's function, unless its result exists.

    The function gets ``folder``, and by name those of ``small``, ``variant``, ``data`` and ``jobs`` that it takes.

    Raises:
        ConfigError: The variant is unknown, the data are missing, or a file cannot be read or written.
    """
    if not experiment.has(variant):
        raise ConfigError(f"{experiment.name} has no variant {variant!r}: choose one of {', '.join(experiment.variants)}")
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
    """Describe a program whose runs are cells.

    Attributes:
        plan: A function of folder, variant and data that makes the cells, or the experiment's sweep.
        axis: The name of the axis on which the ways of measuring stand.
        ways: The ways of measuring a run.
        measured: A function that returns way -> value for a finished cell.
    """

    plan: Callable[[Path, str, str], list[Cell]]
    axis: str
    ways: Sequence[str]
    measured: Callable[[Cell], Mapping[str, float]]


def study(experiment: Experiment, measure: str = "") -> Study:
    """Load the study of the experiment's program: ``plan``, ``AXIS``, ``WAYS`` and ``measured`` of its file.

    Args:
        experiment: The experiment.
        measure: Another program, to measure the experiment's own runs with.

    Raises:
        ConfigError: The file has none of these.
    """
    module = _module(replace(experiment, program=measure or experiment.program))

    def swept(folder: Path, variant: str, data: str) -> list[Cell]:
        return read(experiment.file, variant, data).cells(folder)

    try:
        return Study(module.plan if experiment.program else swept, module.AXIS, module.WAYS, module.measured)
    except AttributeError as error:
        raise ConfigError(f"{experiment.file}: its program keeps no results to commit: {error}") from error


def program_of(experiment: Experiment) -> Callable[..., Any]:
    """Load the experiment's function, from a file in ``programs/`` beside the experiment's own.

    Raises:
        ConfigError: There is no such file or function.
    """
    file, _, name = experiment.program.partition(":")
    program = getattr(_module(experiment), name, None)
    if not callable(program):
        raise ConfigError(f"{experiment.file}: {file} has no function {name!r}")
    return program  # type: ignore[no-any-return]


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
    """Log the experiments that were run, and their seconds: one line per experiment and call."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            path.write_text(",".join(COLUMNS) + "\n")

    def add(self, name: str, variant: str, seconds: float, errors: Mapping[str, str], folder: Path) -> None:
        """Append one line."""
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
