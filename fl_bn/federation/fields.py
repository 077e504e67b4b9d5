"""Declare and check the fields (name -> value) of a received record of a Flower message.

``Form.read`` drops undeclared fields, unless the form has ``others``. Sizes are
checked before any text is parsed, and no parser is recursive.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

from fl_bn.support.wire import WireError, excerpt

LARGEST = 2**53  # whole numbers are exact in float64 up to here
NAME = 300  # characters of a layer's name
NEEDED: Any = object()  # in place of a default: the field must be present


class Values(dict[str, Any]):
    """Hold a record's checked values by field. ``form`` declares the record."""

    def __init__(self, form: Form, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self.form = form


@dataclass(frozen=True)
class Field:
    """Describe the allowed values of one field.

    Attributes:
        fits: Tells whether a value is allowed.
        wanted: The allowed values in words.
        turn: Converts an allowed value to that in ``Values``.
        default: The value of an absent field. None: ``Values`` lacks it.
            ``NEEDED``: an error.
    """

    fits: Callable[[Any], bool]
    wanted: str
    default: Any = NEEDED
    turn: Callable[[Any], Any] = lambda value: value


def whole(least: int = 0, most: int = LARGEST, default: Any = NEEDED) -> Field:
    """Declare a whole number of ``least`` to ``most``. True and 1.0 are refused."""
    wanted = f"a whole number {least}..{most}" if most != LARGEST else f"a whole number >= {least} (and <= 2**53)"
    return Field(lambda v: type(v) is int and least <= v <= most, wanted, default)


def number(least: float = -math.inf, most: float = math.inf, default: Any = NEEDED) -> Field:
    """Declare a finite number of ``least`` to ``most``."""

    def fits(value: Any) -> bool:
        known = isinstance(value, float) or type(value) is int  # a bool is an int, and a numpy.float64 is a float
        return known and -(LARGEST**18) < value < LARGEST**18 and least <= value <= most

    limits = "" if math.isinf(least) else f" >= {least:g}" if math.isinf(most) else f" {least:g}..{most:g}"
    return Field(fits, f"a finite number{limits}", default, float)


def real(least: float, most: float = math.inf) -> Field:
    """Declare a finite float of ``least`` to ``most``. No int, since Flower's code needs a float."""
    one = number(least, most)
    return Field(lambda v: type(v) is float and one.fits(v), f"{one.wanted} as a float", turn=float)


def measured(least: float = -math.inf, most: float = math.inf, default: Any = NEEDED) -> Field:
    """Declare a float that may be infinite or NaN, such as a diverged loss. It never enters the model.

    Finite ``most`` and ``least`` refuse infinity, not NaN.
    """

    def fits(value: Any) -> bool:
        return type(value) is float and (math.isnan(value) or least <= value <= most)

    limits = "" if math.isinf(least) and math.isinf(most) else f" {least:g}..{most:g}, or NaN"
    return Field(fits, f"a number{limits}", default, float)


def text(longest: int, pattern: str = ".*", default: Any = NEEDED, wanted: str = "") -> Field:
    """Declare a text of up to ``longest`` characters that ``pattern`` matches as a whole.

    Matching must take linear time. Errors name ``wanted``, the allowed texts in
    words.
    """
    compiled = re.compile(pattern, re.DOTALL)
    wanted = wanted or f"a text of up to {longest} characters"
    return Field(lambda v: type(v) is str and len(v) <= longest and compiled.fullmatch(v) is not None, wanted, default)


def one_of(*choices: str, default: Any = NEEDED) -> Field:
    """Declare a text that is one of ``choices``."""
    return Field(lambda v: type(v) is str and v in choices, f"one of {', '.join(map(repr, choices))}", default)


def data(longest: int, least: int = 0, default: Any = NEEDED) -> Field:
    """Declare a byte string of ``least`` to ``longest`` bytes."""
    return Field(lambda v: type(v) is bytes and least <= len(v) <= longest, f"{least}..{longest} bytes", default)


def wholes(items: int, default: Any = NEEDED) -> Field:
    """Declare a list of up to ``items`` whole numbers of 64 bits."""

    def fits(value: Any) -> bool:
        return type(value) is list and len(value) <= items and all(type(n) is int and 0 <= n < 2**64 for n in value)

    return Field(fits, f"a list of up to {items} whole numbers >= 0", default)


def blobs(items: int, longest: int) -> Field:
    """Declare a list of up to ``items`` byte strings of up to ``longest`` bytes each."""

    def fits(value: Any) -> bool:
        return type(value) is list and len(value) <= items and all(type(b) is bytes and len(b) <= longest for b in value)

    return Field(fits, f"a list of up to {items} byte strings of up to {longest} bytes")


def whole_list(items: int) -> Field:
    """Declare a JSON list of up to ``items`` whole numbers >= 0, read to a tuple of int.

    Each has up to 15 digits. A regular expression reads it, since nesting could
    break a parser.
    """
    pattern = re.compile(r"\[(?:\d{1,15}(?:, ?\d{1,15})*)?\]", re.ASCII)

    def fits(value: Any) -> bool:
        return type(value) is str and len(value) <= 17 * items + 2 and value.count(",") < items and bool(pattern.fullmatch(value))

    wanted = f"a JSON list of up to {items} whole numbers >= 0 (of up to 15 digits)"
    return Field(fits, wanted, turn=lambda v: tuple(int(n) for n in v[1:-1].split(",") if n))


def wholes_by_name(items: int) -> Field:
    """Declare a JSON object of up to ``items`` entries, such as ``{"stem.bn": 3}``.

    Names have up to ``NAME`` characters, whole numbers up to 15 digits.
    """
    name, digits = rf'"([^"\\]{{0,{NAME}}})"', r"(\d{1,15})"
    pattern = re.compile(rf"\{{(?:{name}: ?{digits}(?:, ?{name}: ?{digits})*)?\}}", re.ASCII)
    pair = re.compile(rf"{name}: ?{digits}", re.ASCII)

    def fits(value: Any) -> bool:
        return type(value) is str and len(value) <= items * (NAME + 20) and value.count(":") <= items and bool(pattern.fullmatch(value))

    wanted = f"a JSON object of up to {items} entries, layer -> whole number >= 0 (of up to 15 digits)"
    return Field(fits, wanted, turn=lambda v: {layer: int(n) for layer, n in pair.findall(v)})


@dataclass(frozen=True)
class Form:
    """Declare the fields of one record.

    Attributes:
        series: Stem of numbered names, such as ``accuracy-class-`` of
            ``accuracy-class-3`` -> field.
        others: Whether undeclared fields are kept unchecked.
    """

    record: str
    fields: Mapping[str, Field]
    series: Mapping[str, Field] = field(default_factory=dict)
    others: bool = False

    MOST = 10_000  # fields of a record, and numbers of a series

    def read(self, record: Mapping[str, Any] | None) -> Values:
        """Check a record (None: missing). Return declared values, or all if it has ``others``.

        Raises:
            WireError: The record or a field is missing or wrong, or there are more
                than ``MOST``.
        """
        if record is None:
            raise WireError(self.record, "", f"missing: expected a record of {', '.join(self.fields)}")
        if len(record) > self.MOST:
            raise WireError(self.record, "", f"expected at most {self.MOST} fields, but got {len(record)}")
        values: dict[str, Any] = {}
        for name, value in record.items():
            if (one := self.declared(name)) is not None:
                if not one.fits(value):
                    raise WireError(self.record, name, f"expected {one.wanted}, but got {excerpt(value)}")
                values[name] = one.turn(value)
            elif self.others:
                values[name] = value
        for name, one in self.fields.items():
            if name not in values and one.default is NEEDED:
                raise WireError(self.record, name, f"expected {one.wanted}, but it is missing")
            if name not in values and one.default is not None:
                values[name] = one.default
        return Values(self, values)

    def and_also(self, *others: Form) -> Self:
        """Return a copy that also has the fields of ``others``."""
        fields = {name: one for other in others for name, one in other.fields.items()}
        return replace(self, fields={**self.fields, **fields})

    def declared(self, name: str) -> Field | None:
        """Return the field ``name``, if it is declared."""
        if name in self.fields:
            return self.fields[name]
        stem = name[:NAME].rstrip("0123456789")
        return self.series.get(stem) if stem != name and len(name) - len(stem) <= 4 else None
