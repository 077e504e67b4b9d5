"""What one check found: of a data set's files, or of a machine that is to take part."""

from __future__ import annotations

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
