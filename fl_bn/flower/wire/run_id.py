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

FOLDER = r"(?![.~ -])[^/\\\x00-\x1f\x7f]{1,255}"
RESUME = re.compile(r"([0-9a-f]{8}):([0-9]{1,15})")
RESUMES = rf"(?:{RESUME.pattern}(?:,{RESUME.pattern})*)?"
FIRST = "0"
NAME = re.compile(rf"{FOLDER}/state-[0-9a-f]{{8}}")


@dataclass(frozen=True)
class RunId:
    """``run``: NAME/state-XXXXXXXX, never given twice; ``resumes``: of every resume that led here, in order of time, a token never given
    twice and the round it went back to; ``durable``: the last round that every later resume can still go back to, so that states older
    than the newest up to it are of no use."""

    run: str
    resumes: tuple[tuple[str, int], ...] = ()
    durable: int = 0

    @classmethod
    def new(cls, name: str) -> RunId:
        """``name``: of the run's folder; ``run`` if it could not be that of one."""
        run = f"{name}/state-{secrets.token_hex(4)}"
        return cls(run if NAME.fullmatch(run) else f"run/state-{secrets.token_hex(4)}")

    @property
    def attempt(self) -> str:
        """The token of the last resume: what is kept since then belongs to it. ``0`` in a run that was never resumed."""
        return self.resumes[-1][0] if self.resumes else FIRST

    @property
    def gone_back_to(self) -> int:
        """The round that the last resume went back to; 0 in a run that was never resumed."""
        return self.resumes[-1][1] if self.resumes else 0

    @property
    def attempts(self) -> list[str]:
        return [FIRST, *(token for token, _ in self.resumes)]

    def resumed(self, round: int) -> RunId:
        """The same run, going on after ``round``. Two resumes from one checkpoint have nothing in common but what is in it."""
        return replace(self, resumes=(*self.resumes, (secrets.token_hex(4), round)))

    def counts(self, round: int, attempt: str) -> bool:
        """Whether what a client kept in ``round`` of ``attempt`` is on the line that led here."""
        if attempt not in self.attempts:
            return False
        return all(round <= resumed for _, resumed in self.resumes[self.attempts.index(attempt) :])

    def to_config(self) -> dict[str, str | int]:
        resumes = ",".join(f"{token}:{round}" for token, round in self.resumes)
        return {"run": self.run, "resumes": resumes, "durable": self.durable}

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> RunId:
        """From a message's config; one that names no run has none.

        Raises:
            ValueError: the name could not be that of a folder below the client's own, or the resumes are no tokens and rounds.
        """
        run, text = str(config.get("run", "")), str(config.get("resumes", ""))
        if run and not NAME.fullmatch(run):
            raise ValueError(f"expected a run NAME/state-XXXXXXXX, but the server calls it {run[:80]!r}")
        resumes = [RESUME.fullmatch(part) for part in text.split(",") if part]
        if not all(resumes):
            raise ValueError(f"expected the run's resumes as TOKEN:ROUND,..., but the server has {text[:80]!r}")
        return cls(run, tuple((found[1], int(found[2])) for found in resumes if found), int(config.get("durable", 0)))
