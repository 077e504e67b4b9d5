"""Which run a message belongs to, and which of the states that a client kept for it still count.

A run that is resumed goes back to a checkpoint: what clients kept after it belongs to rounds that never were. Every instruction
therefore says where the run was resumed, and a client reads the newest state that is still on the line.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

NAME = re.compile(r"[A-Za-z0-9][\w. ()+,=@-]{0,199}/state-[0-9a-f]{8}")


@dataclass(frozen=True)
class Lineage:
    """``run``: NAME/state-XXXXXXXX, never given twice; ``resumes``: the rounds after which the run was resumed, in order of time;
    ``durable``: the last round the server can still go back to, so that states older than the newest up to it are of no use."""

    run: str
    resumes: tuple[int, ...] = ()
    durable: int = 0

    @classmethod
    def new(cls, name: str) -> Lineage:
        safe = re.sub(r"[^\w. ()+,=@-]", "-", name).lstrip("._ ()+,=@-")[:200]
        return cls(f"{safe or 'run'}/state-{secrets.token_hex(4)}")

    @property
    def attempt(self) -> int:
        """How often the run was resumed."""
        return len(self.resumes)

    def resumed(self, round: int) -> Lineage:
        """The same run, going on after ``round``."""
        return replace(self, resumes=(*self.resumes, round))

    def counts(self, round: int, attempt: int) -> bool:
        """Whether what a client kept in ``round`` of ``attempt`` is on the line that led here."""
        return attempt <= self.attempt and all(round <= resumed for resumed in self.resumes[attempt:])

    def to_config(self) -> dict[str, str | int]:
        return {"run": self.run, "resumes": ",".join(map(str, self.resumes)), "durable": self.durable}

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Lineage:
        """From a message's config; one that names no run has none.

        Raises:
            ValueError: the name could not be that of a folder below the client's own, or the rounds are no numbers.
        """
        run, resumes = str(config.get("run", "")), str(config.get("resumes", ""))
        if run and not NAME.fullmatch(run):
            raise ValueError(f"expected a run NAME/state-XXXXXXXX, but the server calls it {run[:80]!r}")
        return cls(run, tuple(int(part) for part in resumes.split(",") if part), int(config.get("durable", 0)))
