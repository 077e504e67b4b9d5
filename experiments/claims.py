"""Read the register of claims: each claim of a paper, the paper's numbers, and the experiment whose table tests the claim.

The register is ``claims.toml``, in the folder of the experiments:

    [rules]                                     # how comparisons are decided, stated before anything is run; see Rules
    seeds = 5
    collapse = 10.0
    share = 0.33
    flat = 1.0
    margin = 1.0

    [[claims]]
    id = "000-T5"                               # named after the paper's table or figure
    place = "Table 5; l. 211"
    claim = "FixBN is ahead of BN and of GN where clients have few classes"
    experiment = "000-F3"                       # the experiment whose table tests the claim; default: the one named like the claim
    variant = "evidence"                        # the variant of that experiment
    steps = [32000, 16000, 16000]               # the paper's local steps per client, in each phase of the learning-rate schedule
    compare = [
        { left = ["FixBN", "Shards"], right = ["BN", "Shards"], paper = [76.56, 53.97], spread = [0.66, 4.18] },
        { left = ["FBN", "0.0"], right = ["centralised", "0.0"], near = true, about = [80, 80], figure = "3a" },
        { left = [["FixBN", "Shards"], ["BN", "Shards"]], right = [["FixBN", "IID"], ["BN", "IID"]], figure = "3" },
        { left = ["BN", "Shards", 16], right = ["BN", "Shards", 128], metric = "drift", figure = "2a" },
    ]

A comparison claims that the value of ``left`` is above that of ``right``. With ``near`` it claims that the two differ by at most the
paper's own difference plus a margin. A side is a place of the table, ``[row, column]`` or ``[row, column, round]``. A side may also be
two places. Then its value is the first place's value minus the second's. ``paper`` has the paper's two numbers. If only a figure shows
the numbers, ``figure`` names the figure, and ``about`` has the numbers that we read off.

    [[own]]                                     # a question of this project: why is a claim contradicted?
    id = "own-robust-updates"
    explains = "003-F4"
    variant = "evidence"
    asks = "..."
    yes = "..."                                 # the answer if all comparisons held
    no = "..."                                  # the answer if none held and at least one is contradicted
    compare = [{ left = ["mean", "FBN"], right = ["median", "FBN"] }, { left = ..., right = ..., within = 2.0 }]
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from fl_bn.app.config import ConfigError
from fl_bn.app.report.cells import title
from fl_bn.support.names import unknown

VARIANT = "evidence"  # the variant of an experiment that tests a claim, unless the claim names another
FILE = "claims.toml"
LEAST = 3  # the number of seeds that decide if the difference is larger than Rules.collapse
KINDS = {"str": "a text", "float": "a number >= 0", "int": "an integer >= 0", "tuple[float, ...]": "a list of numbers above 0"}
COMPARISON = ("left", "right", "near", "margin", "within", "metric", "paper", "about", "spread", "figure")
Place = tuple[str, str, int]  # row, column and round; 0 stands for the round that the experiment's table shows
Pair = tuple[float, float]


@dataclass(frozen=True)
class Side:
    """Describe one side of a comparison: a place of the table of results, or the difference of two places.

    Attributes:
        places: One place or two. Two places stand for the value of the first place minus the value of the second.
    """

    places: tuple[Place, ...]

    @property
    def row(self) -> str:
        """Return the name of this side's row in the table of results.

        If the side is the difference of two places of the table, the name is ``ROW less ROW``.
        """
        return " less ".join(row for row, _, _ in self.places)

    @property
    def column(self) -> str:
        """Return the name of this side's column in the table of results.

        If the side is the difference of places in two columns, the name is ``COLUMN less COLUMN``. If a place names a
        round, ``, round N`` is appended to its column.
        """
        columns = dict.fromkeys(f"{column}, round {round}" if round else column for _, column, round in self.places)
        return " less ".join(columns)


@dataclass(frozen=True)
class Comparison:
    """Describe one comparison of a claim, with the numbers of the paper.

    The comparison claims that ``left`` is above ``right``. With ``near`` or ``within``, it claims that the two are close.

    Attributes:
        left: The first side.
        right: The second side.
        near: Whether the claim is that the sides differ by at most the paper's own difference plus ``margin``.
        margin: The margin of ``near``, in points of the metric; None: the margin of the rules.
        within: The largest number of points by which the sides may differ, according to the claim. None: the claim has no
            such limit. Only this project's own questions may have one.
        metric: The name of the compared metric; empty: the metric of the table.
        paper: The paper's numbers for left and right; None if it does not print them.
        about: The numbers for left and right, read off a figure of the paper; None if they were not read off.
        spread: The spread of the paper's two numbers, as the paper prints it; None if the paper prints no spread.
        figure: The figure of the paper that shows the numbers, if the paper does not print them.
    """

    left: Side
    right: Side
    near: bool = False
    margin: float | None = None
    within: float | None = None
    metric: str = ""
    paper: Pair | None = None
    about: Pair | None = None
    spread: Pair | None = None
    figure: str = ""

    @property
    def numbers(self) -> Pair | None:
        """Return the paper's two numbers, printed or read off a figure; None if there are none."""
        return self.paper or self.about

    @property
    def gap(self) -> float | None:
        """Return the paper's own difference, left minus right; None if its numbers are unknown."""
        return None if self.numbers is None else self.numbers[0] - self.numbers[1]

    def limit(self, margin: float) -> float | None:
        """Return the largest difference in points that the claim allows; None if it claims that left is above right.

        Args:
            margin: The margin of the rules, used if the comparison has no margin of its own.
        """
        if self.near:
            return abs(self.gap or 0.0) + (margin if self.margin is None else self.margin)
        return self.within

    def __str__(self) -> str:
        """Describe the comparison in one line, such as ``FixBN > BN (Shards)``."""
        same = self.left.column == self.right.column
        left, right = (side.row if same else f"{side.row} ({side.column})" for side in (self.left, self.right))
        sign = "near" if self.near else ">" if self.within is None else f"within {self.within:g} of"
        of = f"{title(self.metric)}: " if self.metric else ""
        return f"{of}{left} {sign} {right}{f' ({self.left.column})' if same else ''}"


@dataclass(frozen=True)
class Claim:
    """Describe a claim of a paper, and how this project tests it.

    The length of the paper's training is given in one of three units: ``steps``, ``epochs`` or ``samples``. If all
    three are empty, the claim is not about converged accuracy, and runs of any length test it.

    Attributes:
        id: The id of the claim, which names a table or figure, such as ``000-T5``.
        place: Where the paper makes the claim: the table or figure, and the lines of its text.
        claim: The claim in words.
        experiment: The experiment whose table tests the claim; empty: the experiment whose name is the claim's
            ``id``.
        variant: The variant of that experiment.
        differs: How this project's settings differ from the paper's, in words.
        steps: The paper's local steps per client, in each phase of the learning-rate schedule.
        epochs: The paper's passes over a client's data, in each phase.
        samples: The samples that a client of the paper trains on, in each phase; used if the batches have several
            sizes.
        client_samples: The training samples of a client in this project's runs; needed if these runs count local epochs.
        resampled: The number of test samples per training sample, if every seed divides the same samples anew; 0: all
            seeds have the same test samples.
        rates: The variant of the experiment that tries several learning rates; empty: there is no such variant.
        untestable: Why this project cannot test the claim; empty if it can.
        exact: The test of this project that reproduces the paper's numbers exactly; empty: there is no such test.
        cause: Why this project's result differs from the paper's, in words.
        headline: Which of the comparisons represents the claim in overviews: 1 stands for the first.
        compare: The comparisons that decide the claim.
    """

    id: str
    place: str
    claim: str
    experiment: str = ""
    variant: str = VARIANT
    differs: str = ""
    steps: tuple[float, ...] = ()
    epochs: tuple[float, ...] = ()
    samples: tuple[float, ...] = ()
    client_samples: float = 0.0
    resampled: float = 0.0
    rates: str = ""
    untestable: str = ""
    exact: str = ""
    cause: str = ""
    headline: int = 1
    compare: tuple[Comparison, ...] = ()

    @property
    def of(self) -> str:
        """Return the name of the experiment whose table tests this claim."""
        return self.experiment or self.id


@dataclass(frozen=True)
class Own:
    """Describe a question of this project: why does an experiment contradict a claim?

    Attributes:
        id: The id of the question, ``own-...``.
        explains: The id of the claim.
        asks: The question in words.
        experiment: The experiment whose table answers the question; empty: the experiment whose name is ``id``.
        variant: The variant of that experiment.
        measure: The program that measures every run in several ways, as ``programs/FILE.py``; empty: no program.
        resampled: The number of test samples per training sample, as in ``Claim``.
        yes: The answer if all comparisons held.
        no: The answer if none held and at least one is contradicted.
        compare: The comparisons that answer the question.
    """

    id: str
    explains: str
    asks: str
    experiment: str = ""
    variant: str = VARIANT
    measure: str = ""
    resampled: float = 0.0
    yes: str = ""
    no: str = ""
    compare: tuple[Comparison, ...] = ()

    @property
    def of(self) -> str:
        """Return the name of the experiment whose table answers this question (``asks``)."""
        return self.experiment or self.id


@dataclass(frozen=True)
class Rules:
    """Hold the rules by which comparisons are decided. They are stated before anything is run.

    Attributes:
        seeds: How many seeds decide a comparison.
        collapse: If the two sides differ by more than this number of points, ``LEAST`` seeds decide.
        share: The share of the paper's training length that a run must have, in every phase of the schedule.
        flat: A shorter run also counts if its curve gains fewer points than this in the last fifth of every phase.
        margin: The number of points by which a difference may exceed the paper's own and still count as near.
    """

    seeds: int = 5
    collapse: float = 10.0
    share: float = 1 / 3
    flat: float = 1.0
    margin: float = 1.0


@dataclass(frozen=True)
class Register:
    """Hold the content of ``claims.toml``: the rules, the claims and this project's own questions, in the order of the file."""

    rules: Rules
    claims: tuple[Claim, ...]
    own: tuple[Own, ...] = ()


def read_register(folder: Path) -> Register:
    """Read the register, ``claims.toml`` in ``folder``.

    Raises:
        ConfigError: The file is missing or is not TOML; or an entry lacks a key, or has an unknown key or a wrong
            value.
    """
    file = folder / FILE
    try:
        tables = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{file} cannot be read as the register of claims: {error}") from error
    return parse_register(tables)


def parse_register(tables: Mapping[str, Any]) -> Register:
    """Make the register from the content of its file.

    Raises:
        ConfigError: An entry lacks a key, or has an unknown key or a wrong value.
    """
    for name in tables:
        if name not in ("rules", "claims", "own"):
            raise ConfigError(f"{FILE}: {unknown('table', name, ('rules', 'claims', 'own'))}")
    rules: Rules = _entry(Rules, tables.get("rules", {}), "[rules]")
    claims = tuple(_claim(table) for table in tables.get("claims", []))
    own = tuple(_own(table) for table in tables.get("own", []))
    ids = [*(one.id for one in claims), *(one.id for one in own)]
    if double := {name for name in ids if ids.count(name) > 1}:
        raise ConfigError(f"{FILE}: each id must be unique, but several entries have {', '.join(sorted(double))}")
    if strange := [one for one in own if one.explains not in ids]:
        raise ConfigError(f"{FILE}: {strange[0].id} explains the claim {strange[0].explains!r}, which does not exist")
    return Register(rules, claims, own)


def _claim(table: Mapping[str, Any]) -> Claim:
    where = f"claim {table.get('id', '?')}"
    made: Claim = _entry(Claim, table, where)
    if made.id.startswith("own-"):
        raise ConfigError(f"{FILE}: {where}: the id of a claim must name a table or figure of the paper (see [[own]])")
    if not (made.compare or made.untestable or made.exact):
        raise ConfigError(f"{FILE}: {where} needs one of the keys 'compare' (comparisons), 'untestable' (a reason) and 'exact' (a test)")
    if made.compare and not 1 <= made.headline <= len(made.compare):
        raise ConfigError(f"{FILE}: {where}: headline must be 1..{len(made.compare)}, but got {made.headline}")
    for one in made.compare:
        if one.within is not None:
            raise ConfigError(f"{FILE}: {where}: {one}: 'within' is only for questions in [[own]]: write near = true and a margin instead")
        if (one.paper is None) == (not one.figure):
            raise ConfigError(f'{FILE}: {where}: {one}: expected paper = [LEFT, RIGHT], or figure = "N" if only a figure has them')
        if one.near and one.numbers is None and one.margin is None:
            raise ConfigError(f"{FILE}: {where}: {one}: 'near' needs the paper's two numbers ('paper' or 'about') or a 'margin'")
    return made


def _own(table: Mapping[str, Any]) -> Own:
    where = f"question {table.get('id', '?')}"
    made: Own = _entry(Own, table, where)
    if not made.id.startswith("own-") or not made.compare:
        raise ConfigError(f"{FILE}: {where}: a question in [[own]] needs an id that begins with 'own-', and 'compare'")
    return made


def _entry(kind: type, table: Any, where: str) -> Any:
    """Make an object of the dataclass ``kind`` from a TOML table. The keys are the names of the fields, with ``-`` for ``_``.

    Args:
        kind: The dataclass.
        table: The table.
        where: The name of the entry, for error messages.

    Raises:
        ConfigError: A key is unknown or missing, or its value is of a wrong type.
    """
    if not isinstance(table, dict):
        raise ConfigError(f"{FILE}: {where} must be a table, but got {table!r}")
    known = {one.name.replace("_", "-"): one for one in fields(kind)}
    values: dict[str, Any] = {}
    for key, value in table.items():
        if key not in known:
            raise ConfigError(f"{FILE}: {where}: {unknown('key', key, known)}")
        values[known[key].name] = _value(known[key].type, key, value, where)
    try:
        return kind(**values)
    except TypeError as error:
        raise ConfigError(f"{FILE}: {where} lacks a key: {error}") from error


def _value(kind: Any, key: str, value: Any, where: str) -> Any:
    if key == "compare" and isinstance(value, list):
        return tuple(_comparison(one, where) for one in value)
    fits = {
        "str": isinstance(value, str),
        "float": type(value) in (int, float) and 0 <= value < math.inf,
        "int": type(value) is int and value >= 0,
        "tuple[float, ...]": isinstance(value, list) and all(type(one) in (int, float) and one > 0 for one in value),
    }
    if not fits.get(str(kind), False):
        raise ConfigError(f"{FILE}: {where}: {key} must be {KINDS.get(str(kind), 'a list of comparisons')}, but got {value!r}")
    return tuple(map(float, value)) if isinstance(value, list) else float(value) if kind == "float" else value


def _comparison(value: Any, where: str) -> Comparison:
    wrong = ConfigError(
        f'{FILE}: {where}: a comparison is {{ left = ["ROW", "COLUMN"], right = ["ROW", "COLUMN"], ... }}, but got {value!r}'
    )
    if not isinstance(value, dict):
        raise wrong
    for key in value:
        if key not in COMPARISON:
            raise ConfigError(f"{FILE}: {where}: {unknown('key in a comparison:', key, COMPARISON)}")
    sides = [_side(value.get(name)) for name in ("left", "right")]
    texts: dict[str, Any] = {key: value.get(key, "") for key in ("metric", "figure")}
    pairs: dict[str, Any] = {key: _pair(value[key]) for key in ("paper", "about", "spread") if key in value}
    limits: dict[str, Any] = {key: value[key] for key in ("margin", "within") if key in value}
    good = all(isinstance(text, str) for text in texts.values()) and all(type(limit) in (int, float) for limit in limits.values())
    if not good or None in (*sides, *pairs.values()) or not isinstance(value.get("near", False), bool):
        raise wrong
    left, right = sides
    assert left is not None
    assert right is not None
    return Comparison(left, right, near=value.get("near", False), **texts, **pairs, **limits)


def _side(value: Any) -> Side | None:
    if not isinstance(value, list) or not value:
        return None
    places = [_place(one) for one in (value if isinstance(value[0], list) else [value])]
    return Side(tuple(place for place in places if place)) if len(places) <= 2 and all(places) else None


def _place(value: Any) -> Place | None:
    if not isinstance(value, list) or len(value) not in (2, 3) or not all(isinstance(name, str) for name in value[:2]):
        return None
    round = value[2] if len(value) == 3 else 0
    return (value[0], value[1], round) if type(round) is int and round >= 0 else None


def _pair(value: Any) -> Pair | None:
    if not isinstance(value, list) or len(value) != 2 or not all(type(one) in (int, float) for one in value):
        return None
    return float(value[0]), float(value[1])
