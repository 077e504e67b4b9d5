"""Write errors about names that people type. One sentence has the expected names, the given one, and the nearest known one."""

from __future__ import annotations

import difflib
import re
import unicodedata
from collections.abc import Collection

LONG = 200  # most characters of a value in an error
BLANK = re.compile("[\\u034f\\u115f\\u1160\\u17b4\\u17b5\\u180b-\\u180f\\u2800\\u3164\\ufe00-\\ufe0f\\uffa0\\U000e0100-\\U000e01ef]")
"""Letters and marks that show nothing."""


def visible(text: str) -> bool:
    """Return whether all characters of ``text`` can be seen. Control, invisible and direction characters, and line breaks, cannot."""
    return all(c.isprintable() or unicodedata.category(c) == "Zs" for c in text) and not BLANK.search(text)  # Zs: spaces of any width


def escaped(text: str) -> str:
    r"""Return ``text`` with characters that cannot be seen, but line breaks, as ``\u202e`` or so, which Python and TOML read."""
    return "".join(c if c == "\n" or visible(c) else f"\\u{ord(c):04x}" if ord(c) < 0x10000 else f"\\U{ord(c):08x}" for c in text)


def short(value: object) -> str:
    """Return ``repr(value)``, cut after ``LONG`` characters."""
    text = escaped(repr(value))
    return text if len(text) <= LONG else f"{text[:LONG]}..."


def nearest(name: object, known: Collection[str]) -> str:
    """Return ``: did you mean 'fedbn'?`` with the name in ``known`` that is most similar to ``name``. Empty: none is similar."""
    near = difflib.get_close_matches(name, known, 1) if isinstance(name, str) and name not in known else []
    return f": did you mean {short(near[0])}?" if near else ""


def names_of(text: str) -> tuple[str, ...]:
    """Split a list at its commas. An empty text has no parts."""
    return tuple(part.strip() for part in text.split(",")) if text.strip() else ()


def unknown(what: str, name: object, known: Collection[str], where: str = "") -> str:
    """Return the message for an unknown name, with the most similar known name, or with all if none is similar.

    Args:
        what: the kind of thing that is named, such as "key".
        name: the given name.
        known: the known names.
        where: the place of the name, such as " in [data]", which is added after the name.
    """
    near = nearest(name, known)
    return f"unknown {what} {short(name)}{where}" + (near or f" (known: {', '.join(known)})")


def expected(what: str, name: object, known: Collection[str], others: str = "", hidden: Collection[str] = ()) -> str:
    """Return the message for a name that is not among ``known``.

    Args:
        what: the kind of thing that is named, such as "method".
        name: the given name.
        known: the accepted names.
        others: other accepted values in words, such as ", or a function".
        hidden: further accepted names. The message does not list them, but may suggest the most similar one.
    """
    return f"{what} must be one of {', '.join(known)}{others}, but got {short(name)}{nearest(name, [*known, *hidden])}"


def check_name(what: str, name: object, known: Collection[str]) -> None:
    """Check that ``name`` is among ``known``.

    Args:
        what: the kind of thing that is named, such as "method", for the message.
        name: the given name.
        known: the accepted names.

    Raises:
        ValueError: ``name`` is not among ``known``. The message lists the known names.
    """
    if not isinstance(name, str) or name not in known:
        raise ValueError(expected(what, name, known))
