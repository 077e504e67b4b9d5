"""What one check found, and what to do about it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Finding:
    """``warn``: it may go well as it is; ``fail``: it will not. ``do``: what to do, in both cases. Raises ValueError without it."""

    status: Status
    check: str
    text: str
    do: str = ""

    def __post_init__(self) -> None:
        if bool(self.do) == (self.status == "ok"):
            raise ValueError(f"{self.check}: a warning or a failure says what to do, and nothing else does, but got {self}")

    def __str__(self) -> str:
        """One line, whatever the text holds."""
        told = " -> ".join(filter(None, (self.text, self.do)))
        return f"{self.status:<4}  {self.check}: {' '.join(told.split())}"


def guarded(check: str, look: Callable[[], Finding]) -> Finding:
    """What ``look`` finds; whatever it raises is a failure of that check alone, so that the others are still made."""
    return next(each(check, lambda: [look()]))


def each(check: str, look: Callable[[], Iterable[Finding]]) -> Iterator[Finding]:
    """What ``look`` finds, one by one; whatever it raises ends it with a failure."""
    try:
        yield from look()
    except Exception as error:  # a doctor who faints helps nobody
        yield Finding(
            "fail",
            check,
            f"this could not be checked: {type(error).__name__}: {error}",
            "mend what the message names; if it names nothing on this machine, report it with this line",
        )


def reason(error: Exception) -> str:
    """``error`` in words, without numbers and tuples; its file's name if it has one."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error) or type(error).__name__
