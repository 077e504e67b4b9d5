"""Report errors in received messages, and shorten received texts for logs and errors."""

from __future__ import annotations

import copyreg
import re
from typing import Any

from fl_bn.support.names import escaped, visible

SHOWN = 80  # most characters of a received text in an error
REASON = 500  # most characters of another side's error in a log and a record
END = "'>"
RAISED = re.compile(r"<class '(?:[\w.]*\.)?(\w+)'>:<'")  # Flower's report of an error in a ClientApp: <class 'a.B'>:<'message'>

# on Ray: a traceback, cause by cause
RAY = re.compile(r"\n(?:[\w.]*\.)?(\w+): ((?:.|\n)*?)\n\nThe above exception was the direct cause")


class WireError(ValueError):
    """Signal that a message received from a client or the server is not as expected.

    Attributes:
        section: the section of the message that is wrong.
        tensor: the tensor or field in this section. Empty: the section as a whole.
        problem: the expected value and the received one, in words.
    """

    def __init__(self, section: str, tensor: str, problem: str) -> None:
        self.section, self.tensor, self.problem = printable(section), printable(tensor), problem
        super().__init__(f"{self.section}/{self.tensor}: {problem}" if tensor else f"{self.section}: {problem}")

    def __reduce__(self) -> tuple[Any, ...]:
        return copyreg.__newobj__, (type(self), *self.args), vars(self)  # type: ignore[attr-defined]


class Absent(WireError):
    """Signal that a client says that it could not take part in the round."""


def printable(text: str, most: int = SHOWN) -> str:
    """Return a received text for a log, cut and quoted if it is long or not printable."""
    return text if len(text) <= most and visible(text) else f"{escaped(repr(text[:most]))}{' ...' if len(text) > most else ''}"


def reason(text: str | None) -> str:
    """Shorten Flower's report of an error at a client to one line of ``REASON`` characters.

    If a ClientApp raised the error, the line is ``CLASS: MESSAGE``.
    """
    if ray := RAY.findall((text or "")[-8 * REASON :]):
        text = ": ".join(ray[-1])
    text = (text or "")[: 4 * REASON]
    if raised := RAISED.match(text):
        text = f"{raised[1]}: {text[raised.end() :].removesuffix(END)}"
    line = "".join(c if visible(c) else " " for c in " ".join(text.split()))
    return line if len(line) <= REASON else f"{line[:REASON]} ..."


def excerpt(value: object) -> str:
    """Return a short text for a received value, for an error message.

    A long text is cut, and a long list or a huge number is described, as in "a list
    of 12".
    """
    if isinstance(value, str | bytes):
        return escaped(repr(value[:SHOWN])) + (f" ... ({len(value)} long)" if len(value) > SHOWN else "")
    if isinstance(value, list | tuple):
        return f"a {type(value).__name__} of {len(value)}" if len(value) > 8 else f"[{', '.join(map(excerpt, value))}]"
    if isinstance(value, int) and abs(value) > 2**200:
        return f"a whole number of {value.bit_length()} bits"
    return printable(repr(value))
