"""Names that people type: one sentence says what was expected, what came, and which known name is nearest."""

from __future__ import annotations

import difflib
from collections.abc import Collection

LONG = 200  # characters of a value that an error repeats


def short(value: object) -> str:
    """``repr(value)``, cut after ``LONG`` characters."""
    text = repr(value)
    return text if len(text) <= LONG else f"{text[:LONG]}..."


def nearest(name: object, known: Collection[str]) -> str:
    """``: did you mean 'fedbn'?``, or nothing where no known name is near."""
    near = difflib.get_close_matches(name, known, 1) if isinstance(name, str) and name not in known else []
    return f": did you mean {near[0]!r}?" if near else ""


def names_of(text: str) -> tuple[str, ...]:
    """The parts of a list separated by commas; none of an empty one."""
    return tuple(part.strip() for part in text.split(",")) if text.strip() else ()


def unknown(what: str, name: object, known: Collection[str], where: str = "") -> str:
    """Says that there is no such key, line or table: with the nearest name, or with all where none is near."""
    near = nearest(name, known)
    return f"unknown {what} {short(name)}{where}" + (near or f" (known: {', '.join(known)})")


def expected(what: str, name: object, known: Collection[str], others: str = "", hidden: Collection[str] = ()) -> str:
    """Says that a name is none of ``known``; ``others``: what else could have been given, in words; ``hidden``: names of it."""
    return f"{what} must be one of {', '.join(known)}{others}, but got {short(name)}{nearest(name, [*known, *hidden])}"


def check_name(what: str, name: object, known: Collection[str]) -> None:
    """Raises ValueError where ``name`` is none of ``known``."""
    if not isinstance(name, str) or name not in known:
        raise ValueError(expected(what, name, known))
