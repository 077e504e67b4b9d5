"""Sets the clock of every Python process that has this folder in PYTHONPATH: by FL_BN_SKEW seconds.

For drills: ``datetime.now``, by which Flower signs and dates messages. Not ``time.time``, by which gRPC tells its C core when a call
ends, in true time. libfaketime would do it below Python, but makes ``time.sleep`` of Python 3.11 fail; namespaces of Linux know no other
wall clock.
"""

from __future__ import annotations

import datetime
import os
from typing import Any

SKEW = float(os.environ.get("FL_BN_SKEW", "0"))
REAL = datetime.datetime


class AnyDatetime(type):
    """What C code makes counts as one, too."""

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
