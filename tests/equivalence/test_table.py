"""The table of equivalences: fl-bn computes what the papers' algorithms compute, and none of the tempting mistakes.

A method's rows stand beside its transcription, as ``ROWS`` of a module in ``tests/oracles``. A new module there needs no line here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from fl_bn.methods import METHODS
from tests.equivalence.product import Computed, compute
from tests.equivalence.row import Row, off

MODULES = sorted(path.stem for path in (Path(__file__).parents[1] / "oracles").glob("*.py"))
EVERY: list[Row] = [row for name in MODULES for row in getattr(import_module(f"tests.oracles.{name}"), "ROWS", ())]
ROWS = {row.name: row for row in EVERY}
assert len(ROWS) == len(EVERY), "two rows of one name"
assert METHODS.keys() == {row.method for row in EVERY}, "a method without rows in tests/oracles"


def cases(first: bool = False) -> list[Any]:
    """Return the names of rows and interfaces as test cases: all, or each row with its first interface."""
    every = [(row, door, pytest.mark.slow if door in row.slow else ()) for row in ROWS.values() for door in (*row.doors, *row.slow)]
    chosen = [case for case in every if not first or case[1] == (*case[0].doors, *case[0].slow)[0]]
    return [pytest.param(row.method, row.name, door, marks=marks, id=f"{row.name} ({door})") for row, door, marks in chosen]


@cache
def computed(name: str, door: str) -> Computed:
    return compute(ROWS[name], door)


def apart(name: str, door: str, other: Any) -> float:
    """Return how far fl-bn's result is from ``other``, a reference or a wrong rule of the row."""
    cohorts, found = computed(name, door)
    row = ROWS[name]
    changed = compute(replace(row, **other), door)[1] if isinstance(other, Mapping) else other(replace(row, cohorts=cohorts))
    return off(found, changed, row.only)


@pytest.mark.parametrize(("method_name", "name", "door"), cases())
def test_fl_bn_computes_the_reference(method_name: str, name: str, door: str) -> None:
    assert apart(name, door, ROWS[name].reference) < ROWS[name].tolerance


@pytest.mark.parametrize(("method_name", "name", "door"), cases(first=True))
def test_no_wrong_rule_passes_for_it(method_name: str, name: str, door: str) -> None:
    assert ROWS[name].wrong, "a row needs a negative control"
    passed = [rule for rule, wrong in ROWS[name].wrong.items() if apart(name, door, wrong) < ROWS[name].tolerance]
    assert not passed
