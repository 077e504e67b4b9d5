"""Run checks without raising: an error in a check becomes its finding."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from fl_bn.support.finding import Finding


def guard(check: str, look: Callable[[], Finding]) -> Finding:
    """Return the finding of ``look``. If it raises, return a failure, so that the other checks can still be made."""
    return next(guard_each(check, lambda: [look()]))


def guard_each(check: str, look: Callable[[], Iterable[Finding]]) -> Iterator[Finding]:
    """Yield the findings of ``look``. If it raises, yield a failure as the last one."""
    try:
        yield from look()
    except Exception as error:  # one broken check must not stop the others
        yield Finding(
            "fail",
            check,
            f"this could not be checked: {type(error).__name__}: {error}",
            "correct what the message names; if that is nothing on this machine, report this line as a bug of fl-bn",
        )


def reason(error: Exception) -> str:
    """Return the text of ``error``. For an OSError, leave out the error number, and name the file if there is one."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error) or type(error).__name__
