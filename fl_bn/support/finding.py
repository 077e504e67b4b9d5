"""Describe the result of one check, for example of a data set's files or of a machine on which a client will run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Finding:
    """Hold the result of one check.

    Attributes:
        status: ``ok``; ``warn`` for a possible problem; ``fail`` for a certain one.
        check: the name of the check.
        text: the result in words.
        do: what to do about a warning or a failure. Empty for ``ok``.

    Raises:
        ValueError: ``do`` is missing for a warning or failure, or given for ``ok``.
    """

    status: Status
    check: str
    text: str
    do: str = ""

    def __post_init__(self) -> None:
        if bool(self.do) == (self.status == "ok"):
            raise ValueError(f"{self.check}: a warning or a failure must say what to do, and an ok must not, but got {self}")

    def __str__(self) -> str:
        """Return status, check, text and advice as one line. Line breaks in them become spaces."""
        message = " -> ".join(filter(None, (self.text, self.do)))
        return f"{self.status:<4}  {self.check}: {' '.join(message.split())}"
