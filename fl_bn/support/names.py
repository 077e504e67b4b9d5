"""Write errors about names that people type, with the given name and the nearest known one."""

from __future__ import annotations

import difflib
import re
import unicodedata
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

LONG = 200  # most characters of a value in an error
BLANK = re.compile("[\\u034f\\u115f\\u1160\\u17b4\\u17b5\\u180b-\\u180f\\u2800\\u3164\\ufe00-\\ufe0f\\uffa0\\U000e0100-\\U000e01ef]")
"""Letters and marks that show nothing."""


def visible(text: str) -> bool:
    """Return whether all characters can be seen: no control, invisible or direction ones, or line breaks."""
    return all(c.isprintable() or unicodedata.category(c) == "Zs" for c in text) and not BLANK.search(text)  # Zs: spaces of any width


def escaped(text: str) -> str:
    r"""Return ``text`` with invisible characters, but line breaks, as ``\u202e``, as in Python and TOML."""
    return "".join(c if c == "\n" or visible(c) else f"\\u{ord(c):04x}" if ord(c) < 0x10000 else f"\\U{ord(c):08x}" for c in text)


@contextmanager
def noted(place: Callable[..., str], *about: object) -> Iterator[None]:
    """Add to every error of the user's code a note that says where it was raised."""
    try:
        yield
    except Exception as error:
        error.add_note(place(*about))
        raise


def short(value: object) -> str:
    """Return ``repr(value)``, cut after ``LONG`` characters."""
    text = escaped(repr(value))
    return text if len(text) <= LONG else f"{text[:LONG]}..."


def nearest(name: object, known: Collection[str]) -> str:
    """Return ``: did you mean 'fedbn'?`` with the name in ``known`` most similar to ``name``, if any."""
    near = difflib.get_close_matches(name, known, 1) if isinstance(name, str) and name not in known else []
    return f": did you mean {short(near[0])}?" if near else ""


def names_of(text: str) -> tuple[str, ...]:
    """Split a list at its commas. An empty text has no parts."""
    return tuple(part.strip() for part in text.split(",")) if text.strip() else ()


def unknown(what: str, name: object, known: Collection[str]) -> str:
    """Return the message for an unknown name, with the nearest known name, or with all.

    ``what`` is the kind of thing, such as "key" or "key in [data]:".
    """
    near = nearest(name, known)
    return f"unknown {what} {short(name)}" + (near or f" (known: {', '.join(known)})")


def expected(what: str, name: object, known: Collection[str], others: str = "", hidden: Collection[str] = ()) -> str:
    """Return the message for a name that is not among ``known``.

    ``what`` is the kind of thing, such as "method". ``others`` are other accepted
    values in words. ``hidden`` names are not listed, but may be suggested.
    """
    return f"{what} must be one of {', '.join(known)}{others}, but got {short(name)}{nearest(name, [*known, *hidden])}"


def check_name(what: str, name: object, known: Collection[str]) -> None:
    """Raise ``ValueError`` unless ``name``, of the kind ``what``, is among ``known``."""
    if not isinstance(name, str) or name not in known:
        raise ValueError(expected(what, name, known))
