"""Describe the result of one check, for example of a data set's files or of a machine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Finding:
    """Hold the result of one check.

    Attributes:
        status: ``ok``; ``warn`` for a possible problem; ``fail`` for a certain one.
        text: the result in words.
        do: advice, for a warning or a failure.
    """

    status: Status
    check: str
    text: str
    do: str = ""

    def __str__(self) -> str:
        """Return status, check, text and advice as one line."""
        message = " -> ".join(filter(None, (self.text, self.do)))
        return f"{self.status:<4}  {self.check}: {' '.join(message.split())}"


def guard(check: str, look: Callable[[], Finding]) -> Finding:
    """Return the finding of ``look``, or a failure if it raises."""
    return next(guard_each(check, lambda: [look()]))


def guard_each(check: str, look: Callable[[], Iterable[Finding]]) -> Iterator[Finding]:
    """Yield the findings of ``look``, and a failure if it raises."""
    try:
        yield from look()
    except Exception as error:  # one broken check must not stop the others
        yield failure(check, error)


def failure(check: str, error: Exception) -> Finding:
    """Return the finding of a check that raised ``error``."""
    do = "correct what the message names; if that is nothing on this machine, report this line as a bug of fl-bn"
    return Finding("fail", check, f"{type(error).__name__}: {reason(error)}", do)


def reason(error: Exception) -> str:
    """Return the text of ``error``; for an OSError, without its number, but with the file."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error) or type(error).__name__
