"""Move the clock of every Python process that has this folder in PYTHONPATH by FL_BN_SKEW seconds; drills use it.

Only ``datetime.now`` and ``utcnow`` are moved, by which Flower signs and dates messages. ``time.time`` stays true,
because gRPC passes it to its C core as the deadline of a call. libfaketime would move the clock below Python, but it
makes ``time.sleep`` of Python 3.11 fail. Linux namespaces cannot change the wall clock.
"""

from __future__ import annotations

import datetime
import os
from typing import Any

SKEW = float(os.environ.get("FL_BN_SKEW", "0"))
REAL = datetime.datetime


class AnyDatetime(type):
    """Make ``isinstance(..., datetime)`` accept objects of the original class ``datetime``, too, since C code still creates them."""

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, REAL)

    def __subclasscheck__(cls, kind: Any) -> bool:
        return issubclass(kind, REAL)


class Skewed(REAL, metaclass=AnyDatetime):
    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> Any:
        return REAL.now(tz) + datetime.timedelta(seconds=SKEW)

    @classmethod
    def utcnow(cls) -> Any:
        return REAL.now(datetime.UTC).replace(tzinfo=None) + datetime.timedelta(seconds=SKEW)


if SKEW:
    datetime.datetime = Skewed  # type: ignore[misc]
