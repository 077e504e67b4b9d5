"""What another side sent and this one refuses: the error, and its texts cut so that they neither fill a log nor break its lines."""

from __future__ import annotations

import copyreg
import re
from typing import Any

SHOWN = 80  # characters of what came that an error repeats
REASON = 500  # characters of another side's error that a log and a record repeat
END = "'>"
RAISED = re.compile(r"<class '(?:[\w.]*\.)?(\w+)'>:<'")  # as Flower reports what a ClientApp raised: <class 'a.B'>:<'message'>


class WireError(ValueError):
    """A message is not what this side expects; names the section and the tensor, or the record and the field."""

    def __init__(self, section: str, tensor: str, problem: str) -> None:
        self.section, self.tensor, self.problem = shown(section), shown(tensor), problem
        super().__init__(f"{self.section}/{self.tensor}: {problem}" if tensor else f"{self.section}: {problem}")

    def __reduce__(self) -> tuple[Any, ...]:
        return copyreg.__newobj__, (type(self), *self.args), vars(self)  # type: ignore[attr-defined]


class Absent(WireError):
    """A client that could not take part, and says so."""


def check_samples(samples: int) -> None:
    """Raises Absent where a client says that it trained on none."""
    if samples == 0:
        raise Absent("metrics", "samples", "0: the client trained on nothing this round")


def shown(text: str, most: int = SHOWN) -> str:
    """``text`` for a log: what another side sent neither fills it nor breaks its lines."""
    return text if len(text) <= most and text.isprintable() else f"{text[:most]!r}{' ...' if len(text) > most else ''}"


def reason(text: str | None) -> str:
    """Another side's error on one line, cut to ``REASON`` characters; of what a ClientApp raised, the class's own name and its message."""
    text = (text or "")[: 4 * REASON]
    if raised := RAISED.match(text):
        text = f"{raised[1]}: {text[raised.end() :].removesuffix(END)}"
    line = "".join(c if c.isprintable() else " " for c in " ".join(text.split()))
    return line if len(line) <= REASON else f"{line[:REASON]} ..."


def said(value: object) -> str:
    """``value`` for an error message: at most ``SHOWN`` characters, and nothing large is formatted to find them."""
    if isinstance(value, str | bytes):
        return f"{value[:SHOWN]!r}" + (f" ... ({len(value)} long)" if len(value) > SHOWN else "")
    if isinstance(value, list | tuple):
        return f"a {type(value).__name__} of {len(value)}" if len(value) > 8 else f"[{', '.join(map(said, value))}]"
    if isinstance(value, int) and abs(value) > 2**200:
        return f"a whole number of {value.bit_length()} bits"
    return shown(repr(value))
