"""Errors about messages of the other side (client or server), and short one-line excerpts of its texts for logs and errors."""

from __future__ import annotations

import copyreg
import re
from typing import Any

SHOWN = 80  # most characters of a received text in an error
REASON = 500  # most characters of another side's error in a log and a record
END = "'>"
RAISED = re.compile(r"<class '(?:[\w.]*\.)?(\w+)'>:<'")  # Flower's report of an error in a ClientApp: <class 'a.B'>:<'message'>


class WireError(ValueError):
    """Signal that a message of the other side differs from what this side expects.

    Attributes:
        section: the part of the message that is wrong.
        tensor: the tensor or field in this part. Empty: the part as a whole.
        problem: the expected value and the received one, in words.
    """

    def __init__(self, section: str, tensor: str, problem: str) -> None:
        self.section, self.tensor, self.problem = printable(section), printable(tensor), problem
        super().__init__(f"{self.section}/{self.tensor}: {problem}" if tensor else f"{self.section}: {problem}")

    def __reduce__(self) -> tuple[Any, ...]:
        return copyreg.__newobj__, (type(self), *self.args), vars(self)  # type: ignore[attr-defined]


class Absent(WireError):
    """Signal that a client reports that it could not take part."""


def check_samples(samples: int) -> None:
    """Refuse a report of a client that trained on no samples.

    Raises:
        Absent: ``samples`` is 0.
    """
    if samples == 0:
        raise Absent("metrics", "samples", "0: the client trained on no samples in this round")


def printable(text: str, most: int = SHOWN) -> str:
    """Shorten a received text to ``most`` characters of one line, for a log."""
    return text if len(text) <= most and text.isprintable() else f"{text[:most]!r}{' ...' if len(text) > most else ''}"


def reason(text: str | None) -> str:
    """Shorten another side's error to one line of ``REASON`` characters.

    For an error that a ClientApp raised, the line has the name of the error's class, without its module, and the
    error's message.
    """
    text = (text or "")[: 4 * REASON]
    if raised := RAISED.match(text):
        text = f"{raised[1]}: {text[raised.end() :].removesuffix(END)}"
    line = "".join(c if c.isprintable() else " " for c in " ".join(text.split()))
    return line if len(line) <= REASON else f"{line[:REASON]} ..."


def excerpt(value: object) -> str:
    """Describe a received value for an error message, in at most ``SHOWN`` characters.

    A large value is cut off, or only described.
    """
    if isinstance(value, str | bytes):
        return f"{value[:SHOWN]!r}" + (f" ... ({len(value)} long)" if len(value) > SHOWN else "")
    if isinstance(value, list | tuple):
        return f"a {type(value).__name__} of {len(value)}" if len(value) > 8 else f"[{', '.join(map(excerpt, value))}]"
    if isinstance(value, int) and abs(value) > 2**200:
        return f"a whole number of {value.bit_length()} bits"
    return printable(repr(value))
