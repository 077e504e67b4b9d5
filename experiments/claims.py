"""Read the register of claims: the papers' claims with their numbers, and our tables that test them.

It is ``claims.toml`` beside the experiments:

    [rules]                                     # stated before anything is run
    seeds = 5                                   # that a comparison needs to be decided
    collapse = 10.0                             # points; a larger difference needs LEAST seeds
    share = 0.33                                # of the paper's steps per client, in every phase of the schedule, that a run must have
    flat = 1.0                                  # or its curve gains at most so many points in the last fifth of every phase
    margin = 1.0                                # points beyond the paper's own gap that still count as near

    [[claims]]
    id = "000-T5"                               # the paper's own table or figure
    place = "Table 5; l. 211"
    claim = "FixBN is ahead of BN and of GN where clients have few classes"
    experiment = "000-F3"                       # whose table tests it; without it, the one of that id
    variant = "evidence"                        # of its file
    steps = [32000, 16000, 16000]               # the paper's local steps per client, by phase of the schedule; without it, no gate
    compare = [
        { left = ["FixBN", "Shards"], right = ["BN", "Shards"], paper = [76.56, 53.97], spread = [0.66, 4.18] },
        { left = ["FBN", "0.0"], right = ["centralised", "0.0"], near = true, about = [80, 80], figure = "3a" },
        { left = [["FixBN", "Shards"], ["BN", "Shards"]], right = [["FixBN", "IID"], ["BN", "IID"]], figure = "3" },
        { left = ["BN", "Shards", 16], right = ["BN", "Shards", 128], metric = "drift", figure = "2a" },
    ]

A comparison claims that left is above right. With ``near`` it claims that their distance is at most the paper's own and a margin. A side is
a place of the table, ``[row, column]`` or ``[row, column, round]``, or two places: then it is the first less the second. ``paper`` has the
paper's own two numbers. If a figure alone has them, ``figure`` names it, and ``about`` has the numbers that were read off.

    [[own]]                                     # our question about why a claim is contradicted
    id = "own-robust-updates"
    explains = "003-F4"
    variant = "evidence"
    asks = "..."
    yes = "..."                                 # what it means if all comparisons held, and if none did
    no = "..."
    compare = [{ left = ["mean", "FBN"], right = ["median", "FBN"] }, { left = ..., right = ..., within = 2.0 }]
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from fl_bn.report.cells import title
from fl_bn.run.config import ConfigError
from fl_bn.support.names import unknown

VARIANT = "evidence"  # of an experiment's file, which a claim is tested on unless it names another
FILE = "claims.toml"
LEAST = 3  # seeds of a collapse
COMPARISON = ("left", "right", "near", "margin", "within", "metric", "paper", "about", "spread", "figure")
Place = tuple[str, str, int]  # row, column, and round of the table; round 0: where the table measures
Pair = tuple[float, float]


@dataclass(frozen=True)
class Side:
    """Hold one side of a comparison: the value of a place, or how far the first place is above the second.

    Attributes:
        places: One or two places of the table.
    """

    places: tuple[Place, ...]

    @property
    def row(self) -> str:
        """Return the row, or both rows joined by "less"."""
        return " less ".join(row for row, _, _ in self.places)

    @property
    def column(self) -> str:
        """Return the column, or both columns joined by "less"; a column that both places share is there once."""
        columns = dict.fromkeys(f"{column}, round {round}" if round else column for _, column, round in self.places)
        return " less ".join(columns)


@dataclass(frozen=True)
class Comparison:
    """Compare two sides: ``left`` is above ``right``, or no further from it than claimed.

    Attributes:
        left: The first side.
        right: The second side.
        near: Whether the distance is at most the paper's own gap and a margin.
        margin: Points that ``near`` allows beyond the paper's gap; None: those of the rules.
        within: The largest distance in points, for a question of ours.
        metric: The metric; empty: the table's own.
        paper: The paper's two numbers.
        about: Two numbers that were read off the paper's figure.
        spread: The spread of the paper's numbers.
        figure: The figure with the numbers, if no text has them.
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
        """Return the paper's two numbers, exact or read off; None if the figure has shapes alone."""
        return self.paper or self.about

    @property
    def gap(self) -> float | None:
        """Return the paper's own difference, left less right."""
        return None if self.numbers is None else self.numbers[0] - self.numbers[1]

    def limit(self, margin: float) -> float | None:
        """Return the claimed distance in points; None if an order is claimed.

        Args:
            margin: The margin of the rules.
        """
        if self.near:
            return abs(self.gap or 0.0) + (margin if self.margin is None else self.margin)
        return self.within

    def __str__(self) -> str:
        """Describe the comparison; a column that both sides share is named once."""
        same = self.left.column == self.right.column
        left, right = (side.row if same else f"{side.row} ({side.column})" for side in (self.left, self.right))
        sign = "near" if self.near else ">" if self.within is None else f"within {self.within:g} of"
        of = f"{title(self.metric)}: " if self.metric else ""
        return f"{of}{left} {sign} {right}{f' ({self.left.column})' if same else ''}"


@dataclass(frozen=True)
class Claim:
    """Hold a claim of a paper, and how it is tested here.

    Attributes:
        id: The table or figure of the paper, as an id.
        place: Where the paper makes the claim: table or figure, and lines of the text.
        claim: The claim in words.
        experiment: The experiment whose table tests it; empty: the one named ``id``.
        variant: The variant of that experiment.
        differs: The settings that differ from the paper's.
        steps: The paper's local steps per client, by phase of the schedule; empty: the claim is not about converged
            accuracy.
        epochs: The paper's training, too, in passes over a client's data.
        samples: The paper's training, too, in samples that a client trains on, for batches of several sizes.
        client_samples: Training samples of our clients, if their rounds are counted in epochs.
        seeds: How many seeds decide a comparison; 0: as many as the general rules say.
        resampled: Test samples per training sample, if each seed divides the same samples anew; 0: it does not.
        rates: The variant that tries learning rates.
        untestable: The reason why nothing here can test the claim.
        exact: The test in this project that reproduces the paper's numbers exactly.
        cause: The reason why our result differs from the paper's.
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
    seeds: int = 0
    resampled: float = 0.0
    rates: str = ""
    untestable: str = ""
    exact: str = ""
    cause: str = ""
    compare: tuple[Comparison, ...] = ()

    @property
    def of(self) -> str:
        """Return the experiment whose table tests the claim."""
        return self.experiment or self.id


@dataclass(frozen=True)
class Own:
    """Hold a question of ours about the reason why a claim is contradicted.

    Attributes:
        id: The question's id, ``own-...``.
        explains: The id of the claim.
        asks: The question.
        experiment: The experiment whose table answers it; empty: the one of ``id``.
        variant: The variant of that experiment.
        measure: A program that measures every run in several ways.
        resampled: As in ``Claim``.
        yes: The answer if all comparisons held.
        no: The answer if none held.
        compare: The comparisons.
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
        """Return the experiment whose table answers the question."""
        return self.experiment or self.id


@dataclass(frozen=True)
class Rules:
    """Hold the rules that decide; they are stated before anything is run (see the module's text)."""

    seeds: int = 5
    collapse: float = 10.0
    share: float = 1 / 3
    flat: float = 1.0
    margin: float = 1.0


@dataclass(frozen=True)
class Register:
    """Hold all claims and questions, in the order of the file."""

    rules: Rules
    claims: tuple[Claim, ...]
    own: tuple[Own, ...] = ()


def read_register(folder: Path) -> Register:
    """Read ``claims.toml`` in ``folder``.

    Raises:
        ConfigError: The file is missing or no TOML, or an entry has an unknown key, a wrong value, or lacks a key.
    """
    file = folder / FILE
    try:
        tables = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{file} cannot be read as the register of claims: {error}") from error
    return parse_register(tables)


def parse_register(tables: Mapping[str, Any]) -> Register:
    """Make the register from the tables of its file.

    Raises:
        ConfigError: See ``read_register``.
    """
    for name in tables:
        if name not in ("rules", "claims", "own"):
            raise ConfigError(f"{FILE}: {unknown('table', name, ('rules', 'claims', 'own'))}")
    rules: Rules = _entry(Rules, tables.get("rules", {}), "[rules]")
    claims = tuple(_claim(table) for table in tables.get("claims", []))
    own = tuple(_own(table) for table in tables.get("own", []))
    ids = [*(one.id for one in claims), *(one.id for one in own)]
    if double := {name for name in ids if ids.count(name) > 1}:
        raise ConfigError(f"{FILE}: several entries have the same id, which must be unique: {', '.join(sorted(double))}")
    if strange := [one for one in own if one.explains not in ids]:
        raise ConfigError(f"{FILE}: {strange[0].id} explains {strange[0].explains!r}, but there is no claim with this id")
    return Register(rules, claims, own)


def _claim(table: Mapping[str, Any]) -> Claim:
    where = f"claim {table.get('id', '?')}"
    made: Claim = _entry(Claim, table, where)
    if made.id.startswith("own-"):
        raise ConfigError(f"{FILE}: {where}: a claim's id is the paper's own table or figure; questions of ours stand in [[own]]")
    if not (made.compare or made.untestable or made.exact):
        raise ConfigError(f"{FILE}: {where} needs comparisons (compare), or a reason (untestable), or the test with its numbers (exact)")
    for one in made.compare:
        if one.within is not None:
            raise ConfigError(f"{FILE}: {where}: {one}: within is for questions of ours: give near = true, with a margin")
        if (one.paper is None) == (not one.figure):
            raise ConfigError(f'{FILE}: {where}: {one}: give the paper\'s own two numbers, or figure = "N" where a figure alone has them')
        if one.near and one.numbers is None and one.margin is None:
            raise ConfigError(f"{FILE}: {where}: {one}: near needs the paper's two numbers, or a margin")
    return made


def _own(table: Mapping[str, Any]) -> Own:
    where = f"question {table.get('id', '?')}"
    made: Own = _entry(Own, table, where)
    if not made.id.startswith("own-") or not made.compare:
        raise ConfigError(f"{FILE}: {where}: an id of ours begins with own-, and a question needs comparisons that answer it")
    return made


def _entry(kind: type, table: Any, where: str) -> Any:
    """Make an object of ``kind``, whose fields are the keys of ``table``, ``-`` for ``_``."""
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
        raise ConfigError(f"{FILE}: {where}: {key} must be of type {kind}, but got {value!r}")
    return tuple(map(float, value)) if isinstance(value, list) else float(value) if kind == "float" else value


def _comparison(value: Any, where: str) -> Comparison:
    wrong = ConfigError(
        f'{FILE}: {where}: a comparison is {{ left = ["ROW", "COLUMN"], right = ["ROW", "COLUMN"], ... }}, but got {value!r}'
    )
    if not isinstance(value, dict):
        raise wrong
    for key in value:
        if key not in COMPARISON:
            raise ConfigError(f"{FILE}: {where}: {unknown('key', key, COMPARISON, ' in a comparison')}")
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
