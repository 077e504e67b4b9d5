"""Errors for names that people type. One sentence has the expected names, the given one, and the nearest known one."""

from __future__ import annotations

import difflib
from collections.abc import Collection

LONG = 200  # most characters of a value in an error


def short(value: object) -> str:
    """Return ``repr(value)``, cut after ``LONG`` characters."""
    text = repr(value)
    return text if len(text) <= LONG else f"{text[:LONG]}..."


def nearest(name: object, known: Collection[str]) -> str:
    """Return ``: did you mean 'fedbn'?``, or nothing if no known name is near."""
    near = difflib.get_close_matches(name, known, 1) if isinstance(name, str) and name not in known else []
    return f": did you mean {near[0]!r}?" if near else ""


def names_of(text: str) -> tuple[str, ...]:
    """Split a list at its commas. An empty text has no parts."""
    return tuple(part.strip() for part in text.split(",")) if text.strip() else ()


def unknown(what: str, name: object, known: Collection[str], where: str = "") -> str:
    """Return the message for an unknown key, line or table. It has the nearest known name, or all if none is near."""
    near = nearest(name, known)
    return f"unknown {what} {short(name)}{where}" + (near or f" (known: {', '.join(known)})")


def expected(what: str, name: object, known: Collection[str], others: str = "", hidden: Collection[str] = ()) -> str:
    """Return the message for a name that is not among ``known``.

    Args:
        what: the kind of thing that is named, such as "method".
        name: the given name.
        known: the accepted names.
        others: other accepted values, in words.
        hidden: names of the other accepted values. The error does not list them, but suggests a near one.
    """
    return f"{what} must be one of {', '.join(known)}{others}, but got {short(name)}{nearest(name, [*known, *hidden])}"


def check_name(what: str, name: object, known: Collection[str]) -> None:
    """Refuse a name that is not among ``known``.

    Raises:
        ValueError: with the known names.
    """
    if not isinstance(name, str) or name not in known:
        raise ValueError(expected(what, name, known))
