"""Name fl-bn's records in a message and in a client's state, find and read them, and identify a run.

The records that Flower's examples use, ``config``, ``arrays`` and ``metrics``, belong to the user. They may have any
fields. The names of fl-bn's records begin with ``OURS``, so they never clash with the user's. Errors name a record
without this prefix.

A resumed run goes back to a checkpoint. Anything that clients stored after that checkpoint belongs to rounds
that no longer count. So every instruction lists the resumes of the run (``RunId``), and a client loads the newest state that
still counts.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from fl_bn.federation import fields
from fl_bn.federation.fields import Values

R = TypeVar("R", ArrayRecord, ConfigRecord, MetricRecord)
OURS = "fl-bn/"
ASK_HELLO, STATISTICS, RENDEZVOUS, SAVE = "query.hello", "query.statistics", "query.rendezvous", "query.save"  # kinds of messages
"""The prefix of the names of fl-bn's records, in messages and in Flower's ``context.state``."""


def records_of(content: RecordDict, kind: type[R]) -> dict[str, R]:
    """Return all records of the type ``kind`` (such as ``ArrayRecord``), by name.

    Flower's own properties (``array_records`` ...) create reference cycles. These keep a reply's arrays in
    memory until the garbage collector runs.
    """
    return {name: record for name, record in content.items() if isinstance(record, kind)}


def our_records(content: RecordDict, kind: type[R]) -> dict[str, R]:
    """Return name -> record for fl-bn's records of the type ``kind``. The names lack the prefix ``OURS``."""
    return {name.removeprefix(OURS): record for name, record in records_of(content, kind).items() if name.startswith(OURS)}


def their_records(content: RecordDict, kind: type[R]) -> dict[str, R]:
    """Return the user's records of the type ``kind``, by name."""
    return {name: record for name, record in records_of(content, kind).items() if not name.startswith(OURS)}


def config_of(content: RecordDict) -> dict[str, Any]:
    """Return the fields of fl-bn's config in a message; empty if the message has no config."""
    return dict(our_records(content, ConfigRecord).get("config", ConfigRecord()))


def add_to_config(content: RecordDict, values: Mapping[str, Any]) -> None:
    """Put ``values`` into fl-bn's config of a message. Other messages with the same config stay as they are."""
    content[f"{OURS}config"] = ConfigRecord({**config_of(content), **values})


@dataclass(frozen=True)
class Form(fields.Form):
    """Declare the fields of one record in a message, find the record by its name, and read it.

    Attributes:
        prefix: the beginning of the record's name in a message. Empty: the name is Flower's or the user's.
    """

    prefix: str = OURS

    @property
    def name(self) -> str:
        """Return the record's name in a message."""
        return self.prefix + self.record

    def of_configs(self, content: RecordDict) -> Values:
        """Read the ``ConfigRecord`` that is called ``name`` in a message's ``content``.

        Raises:
            WireError: the record is missing, or one of its fields is missing or not as declared.
        """
        return self.read(records_of(content, ConfigRecord).get(self.name))

    def of_metrics(self, content: RecordDict) -> Values:
        """Read the ``MetricRecord`` that is called ``name`` in a message's ``content``.

        Raises:
            WireError: the record is missing, or one of its fields is missing or not as declared.
        """
        return self.read(records_of(content, MetricRecord).get(self.name))


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
