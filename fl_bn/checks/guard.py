"""Run checks that never raise: what goes wrong in a check is its finding."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from fl_bn.support.finding import Finding


def guard(check: str, look: Callable[[], Finding]) -> Finding:
    """Return the finding of ``look``. If it raises, that check alone has failed, and the others are still made."""
    return next(guard_each(check, lambda: [look()]))


def guard_each(check: str, look: Callable[[], Iterable[Finding]]) -> Iterator[Finding]:
    """Yield the findings of ``look``. If it raises, the check ends with a failure."""
    try:
        yield from look()
    except Exception as error:  # one broken check must not stop the others
        yield Finding(
            "fail",
            check,
            f"this could not be checked: {type(error).__name__}: {error}",
            "mend what the message names; if it names nothing on this machine, report it with this line",
        )


def reason(error: Exception) -> str:
    """Return ``error`` in words: without numbers and tuples, and with the name of its file if it has one."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error) or type(error).__name__
