"""Read a sweep file: a TOML file in which each list is an axis of the sweep.

    title = "FixBN and its baselines"

    [run]                                   # keys of the run config
    rounds = 40
    seed = [0, 1, 2]                        # a list is an axis: one run for each of its values
    dataset = "npz"
    data-path = "{data}/cifar10.npz"        # {data} is the folder given as --data; {AXIS} is the run's value on that axis

    [axes.method]                           # an axis with named values, each of which sets several keys
    "BN" = { method = "fedavg" }
    "FixBN" = { method = "fixbn", freeze-after = 20 }
    "centralised" = { method = "centralised" }                      # trained on all clients' data together; with GN: "centralised-gn"

    [axes.split]
    "IID" = { partition = "iid" }
    "Dirichlet 0.1" = { partition = "dirichlet", partition-parameter = 0.1 }

    [[where]]                               # keys for some combinations only; they override [run] and [axes]
    at = { method = "BN", split = "IID" }
    keys = { learning-rate = 0.1 }

    [report]                                # how the report shows the results: fl_bn/app/report
    rows = "method"
    columns = ["split"]

    [variants.small]                        # a variant with other keys or axes, chosen by --variant small
    run = { rounds = 20, seed = 0 }
    axes.split = ["IID"]                    # a list keeps some values of an axis, and an empty list removes the axis
                                            # a table instead of a list replaces the axis
                                            # where and skip of a variant replace those of the file

Every combination of values is one run. ``skip`` is a list of tables, each with a
combination to leave out.
"""

from __future__ import annotations

import itertools
import json
import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import tomli_w

from fl_bn.app.config import ConfigError, RunConfig
from fl_bn.app.history import round_columns
from fl_bn.app.report.cells import GIGABYTES, MEGABYTES
from fl_bn.app.report.layout import DOMAIN
from fl_bn.app.report.settings import SEED, check_axis, check_names, parse_settings, table_of
from fl_bn.app.sweep.cells import Cell, trained_as
from fl_bn.app.usage import Usage
from fl_bn.support.names import escaped, unknown, visible
from fl_bn.task import TASKS

TABLES = ("title", "run", "axes", "where", "skip", "report", "paper", "notes", "experiment", "variants")
VARIANT_TABLES = ("run", "axes", "where", "skip", "report", "paper", "notes")
PAPER = "paper"  # a name for the file without any of its variants
DATA = "data"  # {data} stands for the folder of the data, even if there is an axis of this name
INSTEAD = {  # run-config keys that the sweep sets itself -> the reason, or what to use instead
    "output": "the folder is --output",
    "name": "a run is called by its values on the axes",
    "resume": "the same command with the same --output goes on",
    "pictures": "the report draws the pictures of all runs",
    "early-stop": "runs that are compared have one length",
}
Axis = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Where:
    """Set run-config keys for some combinations only: an entry of ``[[where]]``, or without keys of ``skip``.

    ``at`` has, by axis, the label that a combination must have. ``keys`` are set
    for it.
    """

    at: Mapping[str, str]
    keys: Mapping[str, Any]

    def has(self, at: Mapping[str, str], keys: Mapping[str, Any]) -> bool:
        """Return whether this entry applies to the combination ``at`` with ``keys``.

        If a variant replaces an axis by a single value, ``keys`` has that value
        under the axis's name.
        """
        return all(at.get(axis, str(keys.get(axis))) == value for axis, value in self.at.items())


@dataclass(frozen=True)
class Sweep:
    """Describe a sweep, from a sweep file or ``fl-bn compare``: combinations of values on axes.

    Attributes:
        title: The title in the report.
        keys: Run-config keys of all runs.
        axes: Axis -> label of a value -> the run-config keys that the value sets.
        skip: The combinations to leave out.
        own: Keys that must have an effect in at least one run. For a variant, they
            are those that it sets itself.
        where: Keys for some combinations only, which override those of ``keys`` and
            ``axes``.
        tables: The other tables of the file, such as [report].
    """

    title: str
    keys: Mapping[str, Any]
    axes: Mapping[str, Axis]
    skip: tuple[Where, ...] = ()
    own: frozenset[str] = frozenset()
    where: tuple[Where, ...] = ()
    tables: Mapping[str, Any] = field(default_factory=dict)

    def points(self) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        """Yield axis -> value, and run-config key -> value, for every combination of values.

        All combinations with the first seed come before those with the second.
        """
        names = sorted(self.axes, key=lambda name: name != "seed")
        for labels in itertools.product(*(self.axes[name] for name in names)):
            at = dict(zip(names, labels, strict=True))
            keys = {**self.keys, **{k: v for name in names for k, v in self.axes[name][at[name]].items()}}
            for case in self.where:
                keys |= case.keys if case.has(at, keys) else {}
            for name, label in at.items():
                keys = keys if name == DATA else _filled(keys, name, label)
            where = {name: keys[name] if name in keys and str(keys[name]) == at[name] else at[name] for name in self.axes}
            if not any(case.has(at, keys) for case in self.skip):
                yield where, keys

    def named(self) -> Iterator[tuple[str, tuple[dict[str, Any], dict[str, Any]]]]:
        """Yield the name of a run's folder, and what ``points`` yields, for every combination of values."""
        for at, keys in self.points():
            name = "-".join(_plain(f"{axis}{value}" if isinstance(value, int | float) else str(value)) for axis, value in at.items())
            yield name or "run", (at, keys)

    def to_toml(self) -> str:
        """Return the text of a sweep file for this sweep alone, without variants."""

        def there(cases: Iterable[Where]) -> list[Where]:
            """Return those that apply to a combination of this sweep."""
            return [c for c in cases if all(v in self.axes.get(axis, {str(self.keys.get(axis))}) for axis, v in c.at.items())]

        tables: dict[str, Any] = {"title": self.title, "skip": [case.at for case in there(self.skip)], "run": self.keys, "axes": self.axes}
        tables |= {"where": [{"at": case.at, "keys": case.keys} for case in there(self.where)]}
        tables |= {name: self.tables[name] for name in ("report", "paper", "notes", "experiment") if self.tables.get(name)}
        return tomli_w.dumps({name: table for name, table in tables.items() if table != []})

    def cells(self, output: Path) -> list[Cell]:
        """Return the cells of the sweep, one for each combination, in ``output/runs``.

        Raises:
            ConfigError: A key is wrong, or has no effect although it is in ``own``;
                two cells have the same folder; a folder holds another run; or there
                is no cell.
        """
        made: list[Cell] = []
        use = Usage()
        for name, (where, keys) in self.named():
            own = {"output": str((output / "runs").resolve()), "name": name, "pictures": False}
            method, centralised = trained_as(keys.get("method", RunConfig.method))
            try:
                config = use.config({**keys, "method": method, **own})
            except ConfigError as error:
                raise ConfigError(f"{_at(where)}: {error}") from error
            made.append(Cell(config, where, centralised))
        names = [cell.config.name for cell in made]
        if double := {name for name in names if names.count(name) > 1}:
            raise ConfigError(f"two values that differ only in punctuation share a folder, so rename one: {', '.join(sorted(double))}")
        if not made:
            raise ConfigError("the sweep has no runs, since an axis is empty or skip leaves out every combination")
        use.check(self.own)
        for cell in made:
            cell.finished()
        return made


def read(path: Path, variant: str = "", data: str = "data", overrides: Mapping[str, Any] | None = None) -> Sweep:
    """Read a sweep file.

    Args:
        path: The file.
        variant: The name of a variant in the file; empty: none.
        data: The folder whose path replaces ``{data}`` in values.
        overrides: Run-config keys that override those of the file.

    Raises:
        ConfigError: The file does not exist, is not TOML, or has an unknown table
            or key, or a wrong value.
    """
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"the sweep file {path} does not exist") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not a TOML file: {error}") from error
    if strange := next((c for c in json.dumps(tables, ensure_ascii=False, default=str) if not visible(c)), ""):
        raise ConfigError(f"{path}: texts must have no invisible characters, but one has {escaped(strange)}")
    try:
        return parse(tables, path.stem, variant, data, overrides or {})
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def parse(tables: Mapping[str, Any], name: str, variant: str, data: str, overrides: Mapping[str, Any]) -> Sweep:
    """Make a sweep from the ``tables`` of a sweep file, as ``read`` does.

    ``name`` is its default title.
    """
    check_names(tables, TABLES, "table")
    chosen = _variant(tables, variant)
    run = {**table_of(tables, "run"), **table_of(chosen, "run")}
    axes = {axis: _axis(axis, values) for axis, values in table_of(tables, "axes").items()}
    for axis, values in table_of(chosen, "axes").items():
        if values == [] and axis in axes:
            del axes[axis]
            continue
        axes[axis] = _kept(axis, axes.get(axis, {}), values) if isinstance(values, list) else _axis(axis, values)
    run |= overrides
    listed = {key: values for key, values in run.items() if isinstance(values, list)}
    if both := [key for key in listed if key in axes]:
        raise ConfigError(f"the axis {both[0]} is given twice, as [axes.{both[0]}] and as a list in [run]: leave one of them out")
    axes |= {key: {_label(value): {key: value} for value in values} for key, values in listed.items()}
    keys = {key: value for key, value in run.items() if key not in listed}
    refuse_decided("the sweep", {**keys, **listed, **dict.fromkeys(_keys_in(axes))})
    axes = {axis: _overridden(axis, values, overrides) for axis, values in axes.items()}
    own = {*table_of(chosen, "run"), *overrides} | _keys_in(table_of(chosen, "axes"))
    if not variant:
        own |= {*keys, *listed} | _keys_in(axes)
    every = {key: [*map(_label, values)] for key, values in table_of(tables, "run").items() if isinstance(values, list)}
    for of in ({key: [_label(value)] for key, value in keys.items()}, table_of(tables, "axes"), axes):
        every |= {axis: [*every.get(axis, []), *values] for axis, values in of.items()}
    where = _where(chosen.get("where", tables.get("where", [])), every, overrides, data)
    if not variant or "where" in chosen:
        own |= {key for case in where for key in case.keys}
    if empty := [axis for axis, values in axes.items() if not values]:
        raise ConfigError(f"the axis {empty[0]} needs at least one value, but has none")
    keys, axes = _filled(keys, DATA, data), {a: {n: _filled(v, DATA, data) for n, v in values.items()} for a, values in axes.items()}
    shown = {**tables, **{key: chosen[key] for key in ("report", "paper", "notes") if key in chosen}}
    shown["report"] = {**table_of(tables, "report"), **table_of(chosen, "report")}
    every_keys = [keys, *(values for axis in axes.values() for values in axis.values())]
    _check_report(shown, name, axes, {str(values["task"]) for values in every_keys if "task" in values})
    skip = chosen.get("skip", tables.get("skip", ()))
    if not all(isinstance(case, dict) and case for case in skip):
        raise ConfigError(f"skip must be a list of tables as in [{{ AXIS = VALUE }}], but got {skip!r}")
    skip = _where([{"at": case, "keys": {}} for case in skip], every, {}, data, "skip")
    return Sweep(str(tables.get("title", name)), keys, axes, skip, frozenset(own), where, shown)


def _where(
    cases: Any, axes: Mapping[str, Sequence[str]], overrides: Mapping[str, Any], data: str, what: str = "where"
) -> tuple[Where, ...]:
    """Read the entries of ``[[where]]``, or those of ``what``, or raise ``ConfigError``.

    ``axes`` has all labels of the file and the variant. ``overrides`` are keys that
    override the entries'.
    """
    made = []
    for case in cases:
        if not isinstance(case, dict) or set(case) != {"at", "keys"} or not all(isinstance(part, dict) for part in case.values()):
            raise ConfigError(f'[[where]] must have at = {{ axis = "value" }} and keys = {{ key = value }}, but got {case!r}')
        for axis, value in case["at"].items():
            if axis not in axes:
                raise ConfigError(unknown(f"axis in {what}:", axis, list(axes)))
            if str(value) not in axes[axis]:
                raise ConfigError(unknown(f"value of {axis} in {what}:", str(value), list(dict.fromkeys(axes[axis]))))
        refuse_decided("the sweep", case["keys"])
        keys = {key: value for key, value in _filled(case["keys"], DATA, data).items() if key not in overrides}
        made.append(Where({axis: str(value) for axis, value in case["at"].items()}, keys))
    return tuple(made)


def _check_report(tables: Mapping[str, Any], name: str, axes: Mapping[str, Axis], tasks: Collection[str]) -> None:
    """Check [report] of a sweep file before the first run, or raise ``ConfigError``.

    A metric must be a column of results; a task of the user's own may have any.
    """
    settings = parse_settings(tables, name, "")
    columns = {MEGABYTES, GIGABYTES, *(column for task in TASKS.values() for column in round_columns(task()))}
    if settings.metric and settings.metric not in columns and not any(":" in task for task in tasks):
        raise ConfigError(unknown("metric in [report]:", settings.metric, sorted(columns)))
    every = [*axes, *([DOMAIN] if settings.domains else [])]
    others = [axis for axis in every if axis != SEED]
    named = {"rows": (settings.rows,), "columns": settings.columns or (), "against": settings.against}
    for what, of in named.items():
        for axis in filter(None, of):
            check_axis(axis, what, every if what == "against" else others)


def _variant(tables: Mapping[str, Any], variant: str) -> Mapping[str, Any]:
    variants = table_of(tables, "variants")
    if variant in ("", PAPER) and variant not in variants:
        return {}
    if variant not in variants:
        raise ConfigError(f"the file has no variant {variant!r}; its variants are: {', '.join(variants) or 'none'}")
    chosen = table_of(variants, variant)
    check_names(chosen, VARIANT_TABLES, f"table in variant {variant!r}:")
    return chosen


def _axis(axis: str, values: Any) -> Axis:
    if not isinstance(values, dict) or not all(isinstance(keys, dict) for keys in values.values()):
        raise ConfigError(f'[axes.{axis}] must have lines like "IID" = {{ partition = "iid" }}, but got {values!r}')
    if nested := [f"{label}: {key}" for label, keys in values.items() for key, value in keys.items() if isinstance(value, list | dict)]:
        raise ConfigError(f"[axes.{axis}] must have single values, but {nested[0]} is a list or a table: make it an axis")
    return {label: dict(keys) for label, keys in values.items()}


def refuse_decided(command: str, keys: Mapping[str, Any], instead: Mapping[str, str] = MappingProxyType({})) -> None:
    """Raise ``ConfigError`` if ``keys`` has keys that a command sets itself for each run.

    ``instead`` has further such keys -> the advice for the user.
    """
    advice = {**INSTEAD, **instead}
    if taken := [key for key in keys if key in advice]:
        raise ConfigError(f"{command} sets {taken[0]} for each of its runs itself: leave it out ({advice[taken[0]]})")


def _keys_in(axes: Mapping[str, Any]) -> set[str]:
    """Return the run-config keys that the axes' values set. A list of labels adds none."""
    return {key for values in axes.values() if isinstance(values, dict) for keys in values.values() for key in keys}


def _kept(axis: str, values: Axis, labels: list[Any]) -> Axis:
    if unknown := [label for label in labels if label not in values]:
        raise ConfigError(f"the variant keeps {unknown[0]!r} of [axes.{axis}], which has {', '.join(values) or 'no values'}")
    return {label: values[label] for label in labels}


def _overridden(axis: str, values: Axis, overrides: Mapping[str, Any]) -> Axis:
    """Return an axis without the keys that ``overrides`` sets for all runs.

    If ``overrides`` has the axis itself, or two of its values do not differ any
    more, ``ConfigError`` is raised.
    """
    remaining = {label: {key: value for key, value in keys.items() if key not in overrides} for label, keys in values.items()}
    for one, other in itertools.combinations(values, 2):
        varied = [key for key in overrides if values[one].get(key) != values[other].get(key)]
        if axis in varied or (varied and remaining[one] == remaining[other]):
            key = axis if axis in varied else varied[0]
            raise ConfigError(f"[axes.{axis}] has several {key} ({one!r}, {other!r}), so --run-config cannot set it: leave it out")
    return remaining


def _filled(keys: Mapping[str, Any], name: str, text: str) -> dict[str, Any]:
    """Return ``keys`` with ``{name}`` replaced by ``text`` in every value."""
    return {key: value.replace(f"{{{name}}}", text) if isinstance(value, str) else value for key, value in keys.items()}


def _label(value: Any) -> str:
    if isinstance(value, list | dict):
        raise ConfigError(f"an axis must be a list of numbers, texts or booleans, but one of its values is {value!r}")
    return str(value)


def _plain(text: str) -> str:
    return "".join(c if c.isalnum() or c in "_.+=" else "_" for c in text).lstrip(".-~") or "_"


def _at(where: Mapping[str, Any]) -> str:
    return ", ".join(f"{axis} {value}" for axis, value in where.items()) or "the run"
