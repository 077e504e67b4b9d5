"""Identify a run, so that a client finds its states and knows which of them still count.

A resumed run goes back to a checkpoint. Anything that clients stored after that checkpoint belongs to rounds
that no longer count. So every instruction lists the resumes of the run, and a client loads the newest state that still
counts.
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
    """Identify a run, and list how often it was resumed and from which rounds.

    Attributes:
        run: the run's unique name NAME/state-XXXXXXXX: the name of its folder, and eight random hexadecimal digits.
        resumes: one pair for each resume, in order of time: a random token, and the round of the checkpoint to which the
            run went back.
        durable: the earliest round to which a later resume can go back. So a client needs only the newest of its states
            up to this round.
    """

    run: str
    resumes: tuple[tuple[str, int], ...] = ()
    durable: int = 0

    @classmethod
    def new(cls, name: str) -> RunId:
        """Return the id of a new run in the folder ``name``. If no folder can have that name, the id has the name ``run``."""
        run = f"{name}/state-{secrets.token_hex(4)}"
        return cls(run if NAME.fullmatch(run) else f"run/state-{secrets.token_hex(4)}")

    @property
    def attempt(self) -> str:
        """Return the token of the last resume, which clients store with their states. ``0``: the run was never resumed."""
        return self.resumes[-1][0] if self.resumes else FIRST

    @property
    def gone_back_to(self) -> int:
        """Return the round to which the last resume went back. 0 if the run was never resumed."""
        return self.resumes[-1][1] if self.resumes else 0

    @property
    def attempts(self) -> list[str]:
        """Return ``0``, which is the token of the start, and the tokens of all resumes in order of time."""
        return [FIRST, *(token for token, _ in self.resumes)]

    def resumed(self, round: int) -> RunId:
        """Return the id of this run when it is resumed after ``round``.

        Every resume gets a random token. If a run is resumed twice from one checkpoint, clients ignore, after the second
        resume, the states that they stored after the first.
        """
        return replace(self, resumes=(*self.resumes, (secrets.token_hex(4), round)))

    def counts(self, round: int, attempt: str) -> bool:
        """Return whether a client's state still counts: no resume has undone the round in which it was stored.

        Args:
            round: the round in which the state was stored.
            attempt: the token of the last resume at that time. ``0``: the run had not been resumed.
        """
        if attempt not in self.attempts:
            return False
        return all(round <= resumed for _, resumed in self.resumes[self.attempts.index(attempt) :])

    def to_config(self) -> dict[str, str | int]:
        """Return this id as fields of a message's config. Empty fields are left out: Flower's ``message_size_mod`` fails on them."""
        resumes = ",".join(f"{token}:{round}" for token, round in self.resumes)
        return {"run": self.run, **({"resumes": resumes} if resumes else {}), "durable": self.durable}

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> RunId:
        """Read the id from a message's config. The id's ``run`` is empty if the config names no run.

        Raises:
            ValueError: the field ``run`` is not NAME/state-XXXXXXXX, the field ``resumes`` is not TOKEN:ROUND,..., or the
                field ``durable`` is not a number.
        """
        run, text = str(config.get("run", "")), str(config.get("resumes", ""))
        if run and not NAME.fullmatch(run):
            raise ValueError(f"expected a run NAME/state-XXXXXXXX, but the server's message names {run[:80]!r}")
        resumes = [RESUME.fullmatch(part) for part in text.split(",") if part]
        if not all(resumes):
            raise ValueError(f"expected TOKEN:ROUND,... with one part for each resume, but the server's message has {text[:80]!r}")
        return cls(run, tuple((match[1], int(match[2])) for match in resumes if match), int(config.get("durable", 0)))
