"""Checks that never raise: what goes wrong in one is what it found."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from fl_bn.support.finding import Finding


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
