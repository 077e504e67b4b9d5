"""Find and run experiments: each has a file in ``experiments/definitions/``.

An experiment reproduces a table or figure of a paper, and its file is named after this table or figure. Or it answers a
question of this project, and its file is named ``own-...``. The file is a sweep file with one more table:

    [experiment]
    paper = "FixBN"
    program = "programs/normalisation_error.py:run"    # only if the experiment is a function, not a sweep
    made = { small = "abide" }                         # a variant whose data a function of data/made.py makes

The function at ``program`` takes ``folder``, and may also take ``small``, ``variant``, ``data`` and ``jobs``.
"""

from __future__ import annotations

import csv
import importlib.util
import inspect
import shutil
import sys
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from experiments.claims import FILE
from experiments.pages import PAGE, write_program_page
from fl_bn.app.assembly import limit_threads
from fl_bn.app.config import ConfigError
from fl_bn.app.sweep.cells import Cell
from fl_bn.app.sweep.file import PAPER, read
from fl_bn.data.dataset import DataNotFound

FOLDER = Path(__file__).parent / "definitions"
COLUMNS = ("finished", "experiment", "variant", "seconds", "failed", "folder")


@dataclass(frozen=True)
class Experiment:
    """Describe one experiment, which reproduces a table or figure of a paper, or answers a question of this project.

    Attributes:
        name: The name of the experiment, which is the name of its file without suffix, such as ``000-F3``.
        file: The file of the experiment.
        paper: The name of the paper.
        title: What the table or figure shows.
        variants: The names of the variants in the file.
        program: The function of an experiment that is not a sweep, as ``programs/FILE.py:FUNCTION``; empty for a
            sweep.
        made: Variant -> the function of ``data/made.py`` that makes its data.
    """

    name: str
    file: Path
    paper: str
    title: str
    variants: tuple[str, ...]
    program: str = ""
    made: Mapping[str, str] = field(default_factory=dict)

    def has(self, variant: str) -> bool:
        """Return whether the experiment has a variant of this name.

        The paper's own settings (``paper``, or the empty name) are always there.
        """
        return variant in ("", PAPER, *self.variants)


def find(names: Sequence[str] = ("all",), folder: Path = FOLDER) -> list[Experiment]:
    """Return the experiments that ``names`` stand for, in the order of their files.

    Args:
        names: Names of experiments. ``all`` stands for all experiments. ``003`` stands for all experiments whose names begin
            with ``003-``, the number of a paper. ``own`` stands for the experiments on questions of this project.
        folder: The folder with the files of the experiments.

    Raises:
        ConfigError: A name is unknown, or the folder has no experiments.
    """
    files = sorted(file for file in folder.glob("*.toml") if file.name != FILE)
    if not files:
        raise ConfigError(f"{folder} has no experiments: run this command in a checkout of fl-bn's repository")
    known = [_read(file) for file in files]
    for name in names:
        if not any(_is_named(e, name) for e in known):
            raise ConfigError(f"there is no experiment {name!r}: choose one of {', '.join(e.name for e in known)}")
    return [e for e in known if any(_is_named(e, name) for name in names)]


def _is_named(experiment: Experiment, name: str) -> bool:
    """Return whether ``name`` stands for the experiment: its own name, the part before the hyphen, or ``all``."""
    return name == "all" or name.lower() in (experiment.name.lower(), experiment.name.partition("-")[0])


def data_of(experiment: Experiment, variant: str, data: str, folder: Path) -> str:
    """Return the folder of a variant's data; make the data first if a function makes them, unless they exist.

    Args:
        experiment: The experiment.
        variant: The variant.
        data: The folder of the data that are not made.
        folder: The folder of the results, in which the data are made.
    """
    if variant not in experiment.made:
        return data
    from experiments.data import made

    place = folder / "data"
    if not place.exists():
        unfinished = folder / "data.unfinished"
        shutil.rmtree(unfinished, ignore_errors=True)
        getattr(made, experiment.made[variant])(unfinished)
        unfinished.rename(place)
    return str(place)


def perform_program(experiment: Experiment, variant: str, data: str, folder: Path, jobs: int = 1) -> None:
    """Call the function of an experiment, and write a report of its results. If the report exists, do nothing.

    The function gets ``folder``. If it has parameters called ``variant``, ``data``, ``jobs`` or ``small``, it gets these, too.
    ``small`` is True for the variant ``small``.

    Args:
        experiment: An experiment with a program.
        variant: The variant; empty for the paper's own settings.
        data: The folder of the data.
        folder: The folder for the results.
        jobs: The number of runs at a time.

    Raises:
        ConfigError: The variant is unknown, the data are missing, or a file cannot be read or written.
    """
    if not experiment.has(variant):
        raise ConfigError(f"{experiment.name} has no variant {variant!r}: choose one of {', '.join(experiment.variants)}")
    if (folder / PAGE).exists():
        return
    called = program_of(experiment)
    folder.mkdir(parents=True, exist_ok=True)
    limit_threads(1)  # the matrices are small, so more threads would only wait for each other
    known: dict[str, Any] = {"small": variant == "small", "variant": variant, "data": data, "jobs": jobs}
    try:
        called(folder, **{name: value for name, value in known.items() if name in inspect.signature(called).parameters})
    except (DataNotFound, OSError) as error:
        raise ConfigError(f"{experiment.name}: {error}") from error
    write_program_page(folder, experiment.file)


@dataclass(frozen=True)
class Study:
    """Describe a program that measures each run of an experiment in several ways.

    For example, it may measure the accuracy with averaged and with exact statistics. The table of results has an axis whose
    values are the ways. A cell is one run of the experiment, with its value on each axis.

    Attributes:
        plan: Takes the folder of the runs, the variant and the folder of the data. It returns the cells to run.
        axis: The name of the axis whose values are the ways.
        ways: The names of the ways.
        measured: Takes a finished cell. It returns way -> the measured value.
    """

    plan: Callable[[Path, str, str], list[Cell]]
    axis: str
    ways: Sequence[str]
    measured: Callable[[Cell], Mapping[str, float]]


def study(experiment: Experiment, measure: str = "") -> Study:
    """Load the study of an experiment from its program, a Python file that defines ``plan``, ``AXIS``, ``WAYS`` and ``measured``.

    Args:
        experiment: The experiment.
        measure: Another program that measures the runs of the experiment; empty: the experiment's own program. If the
            experiment is a sweep, the sweep file defines the cells, and the program needs no ``plan``.

    Raises:
        ConfigError: The program's file does not define one of the names that it needs.
    """
    module = _module(replace(experiment, program=measure or experiment.program))

    def swept(folder: Path, variant: str, data: str) -> list[Cell]:
        return read(experiment.file, variant, data).cells(folder)

    try:
        return Study(module.plan if experiment.program else swept, module.AXIS, module.WAYS, module.measured)
    except AttributeError as error:
        names = "plan, AXIS, WAYS and measured" if experiment.program else "AXIS, WAYS and measured"
        raise ConfigError(f"{experiment.file}: its program must define {names}, but {error}") from error


def program_of(experiment: Experiment) -> Callable[..., Any]:
    """Load the function of an experiment from a file in ``programs/``, a folder next to the experiment's file.

    Raises:
        ConfigError: The file or the function does not exist.
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
        raise ConfigError(f"{experiment.file}: program must be programs/FILE.py:FUNCTION, but is {experiment.program!r}")
    spec = importlib.util.spec_from_file_location(f"experiments.definitions.programs.{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules.get(spec.name) or importlib.util.module_from_spec(spec)
    if spec.name not in sys.modules:
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    return module


class Log:
    """Write a CSV file with one line for each experiment that was run.

    Args:
        path: The file. If it exists, lines are appended.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            path.write_text(",".join(COLUMNS) + "\n")

    def add(self, name: str, variant: str, seconds: float, errors: Mapping[str, str], folder: Path) -> None:
        """Append the line of one experiment.

        Args:
            name: The name of the experiment.
            variant: The variant; empty: the paper's own settings.
            seconds: How long the experiment took.
            errors: Name of a failed run -> its error. The line has the number of failed runs.
            folder: The folder of the results.
        """
        with self._path.open("a", newline="") as file:
            row = (time.strftime("%Y-%m-%d %H:%M:%S"), name, variant or "full", f"{seconds:.0f}", len(errors), folder.name)
            csv.writer(file).writerow(row)


def _read(file: Path) -> Experiment:
    try:
        tables = tomllib.loads(file.read_text(encoding="utf-8"))
        about = tables["experiment"]
        variants = tuple(about.get("variants", tables.get("variants", {})))
        return Experiment(file.stem, file, about["paper"], tables["title"], variants, about.get("program", ""), about.get("made", {}))
    except (tomllib.TOMLDecodeError, KeyError) as error:
        raise ConfigError(f"{file}: an experiment needs a title and a table [experiment] with the key paper: {error}") from error
