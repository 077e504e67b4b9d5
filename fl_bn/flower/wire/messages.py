"""Declare all fields of messages, in both directions; find the records, and identify a run.

A received value is checked by its declaration before it is used. Arrays are declared in ``schema``, by
model, method and phase, requests of the layer-wise exchange in ``exchange.grpc.wire`` and
``exchange.session``. Every other value that server and client read from each other is a field below.

The records ``config``, ``arrays`` and ``metrics``, which Flower's examples use, belong to the user, and
may have any fields. The names of fl-bn's records begin with ``OURS``. Errors name a record without this
prefix. A server refuses a client with another version of fl-bn when the client introduces itself.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, TypeVar

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from fl_bn.federation import fields
from fl_bn.federation.fields import (
    NEEDED,
    Values,
    blobs,
    data,
    measured,
    number,
    one_of,
    real,
    text,
    whole,
    whole_list,
    wholes,
    wholes_by_name,
)
from fl_bn.federation.replies import REPLIED as SAMPLES
from fl_bn.federation.replies import TRAINED as NUMBERS
from fl_bn.methods import INPUTS, MEASURED, Phase
from fl_bn.secure.settings import FINEST, WIDEST
from fl_bn.support.extras import version_of
from fl_bn.support.wire import printable
from fl_bn.task import Task

R = TypeVar("R", ArrayRecord, ConfigRecord, MetricRecord)
OURS = "fl-bn/"
"""The prefix of the names of fl-bn's records, in messages and in Flower's ``context.state``."""
ASK_HELLO, STATISTICS, RENDEZVOUS, SAVE = "query.hello", "query.statistics", "query.rendezvous", "query.save"  # kinds of messages


def records_of(content: RecordDict, kind: type[R]) -> dict[str, R]:
    """Return all records of the type ``kind`` (such as ``ArrayRecord``), by name.

    Flower's own properties (``array_records`` ...) create reference cycles, which keep a reply's arrays
    in memory until the garbage collector runs.
    """
    return {name: record for name, record in content.items() if isinstance(record, kind)}


def our_records(content: RecordDict, kind: type[R]) -> dict[str, R]:
    """Return fl-bn's records of the type ``kind`` by name, without the prefix ``OURS``."""
    return {name.removeprefix(OURS): record for name, record in records_of(content, kind).items() if name.startswith(OURS)}


def their_records(content: RecordDict, kind: type[R]) -> dict[str, R]:
    """Return the user's records of the type ``kind``, by name."""
    return {name: record for name, record in records_of(content, kind).items() if not name.startswith(OURS)}


def config_of(content: RecordDict) -> dict[str, Any]:
    """Return the fields of fl-bn's config in a message; empty if there is none."""
    return dict(our_records(content, ConfigRecord).get("config", ConfigRecord()))


def add_to_config(content: RecordDict, values: Mapping[str, Any]) -> None:
    """Put ``values`` into fl-bn's config of a message, but not of other messages with the same config."""
    content[f"{OURS}config"] = ConfigRecord({**config_of(content), **values})


@dataclass(frozen=True)
class Form(fields.Form):
    """Declare a message's record, find it by its name, which begins with ``prefix``, and read it."""

    prefix: str = OURS

    @property
    def name(self) -> str:
        """Return the record's name in a message."""
        return self.prefix + self.record

    def of(self, content: RecordDict) -> Values:
        """Read this record, or raise ``WireError`` if it, or a field, is missing or not as declared."""
        record: Any = content.get(self.name)
        return self.read(None if isinstance(record, ArrayRecord) else record)


config = partial(Form, "config", others=True)  # a part of fl-bn's config, which may have fields of other parts


FOLDER = r"(?![.~ -])[^/\\\x00-\x1f\x7f]{1,255}"
RESUME = re.compile(r"([0-9a-f]{8}):([0-9]{1,15})")
RESUMES = rf"(?:{RESUME.pattern}(?:,{RESUME.pattern})*)?"
FIRST = "0"
NAME = re.compile(rf"{FOLDER}/state-[0-9a-f]{{8}}")


@dataclass(frozen=True)
class RunId:
    """Identify a run, and list how often it was resumed and from which rounds.

    Attributes:
        run: the run's unique name NAME/state-XXXXXXXX: the name of its folder, and eight random
            hexadecimal digits.
        resumes: a random token, and the round of the checkpoint to which the run went back, for each
            resume in order of time.
        durable: the earliest round to which a later resume can go back. So a client needs only the
            newest of its states up to this round.
    """

    run: str
    resumes: tuple[tuple[str, int], ...] = ()
    durable: int = 0

    @classmethod
    def new(cls, name: str) -> RunId:
        """Return the id of a new run in the folder ``name``, or ``run`` if no folder can have that name."""
        run = f"{name}/state-{secrets.token_hex(4)}"
        return cls(run if NAME.fullmatch(run) else f"run/state-{secrets.token_hex(4)}")

    @property
    def attempt(self) -> str:
        """Return the token of the last resume, which clients store with their states, else ``0``."""
        return self.resumes[-1][0] if self.resumes else FIRST

    @property
    def attempts(self) -> list[str]:
        """Return ``0``, the token of the start, and the tokens of all resumes in order of time."""
        return [FIRST, *(token for token, _ in self.resumes)]

    def resumed(self, round: int) -> RunId:
        """Return the id of this run when it is resumed after ``round``.

        Every resume gets a random token. So after a second resume from one checkpoint, clients ignore
        the states that they stored after the first.
        """
        return replace(self, resumes=(*self.resumes, (secrets.token_hex(4), round)))

    def counts(self, round: int, attempt: str) -> bool:
        """Return whether a state of ``round``, stored after the resume ``attempt``, still counts."""
        if attempt not in self.attempts:
            return False
        return all(round <= resumed for _, resumed in self.resumes[self.attempts.index(attempt) :])

    def to_config(self) -> dict[str, str | int]:
        """Return this id as fields of a message's config, without empty ones, on which Flower fails."""
        resumes = ",".join(f"{token}:{round}" for token, round in self.resumes)
        return {"run": self.run, **({"resumes": resumes} if resumes else {}), "durable": self.durable}

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> RunId:
        """Read the id from a message's checked config. Its ``run`` is empty if the config names none."""
        resumes = tuple((token, int(round)) for token, round in RESUME.findall(config.get("resumes", "")))
        return cls(config.get("run", ""), resumes, config.get("durable", 0))


REQUIRED = "secure-aggregation"  # a key of the run config or of a client's node config: send nothing unmasked
RECORD_KEY_CONFIGS = "secaggplus_configs"  # Flower's name for SecAgg+'s record, here so that a plain run imports nothing of SecAgg+
CLASSES, LAYERS, NODES, CLIENTS = 65_536, 10_000, 10_000, 100_000  # the most entries of each kind in a message
HOST = r"(?:\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+)"
ADDRESS = rf"{HOST}:[0-9]{{1,5}}"  # of the layer-wise exchange
KEY, SHARE = 1024, 4096  # the most bytes of a public key, and of an encrypted pair of shares

HEADER = Form(
    "header",
    {
        "method": text(64),
        "phase": one_of(*(phase.value for phase in Phase)),
        "round": whole(),
        "signature": text(64),
    },
)

# from a client

HELLO = Form(
    "hello",
    {
        "client": whole(),
        "clients": whole(1, CLIENTS),
        "samples": whole(),
        "signature": text(64),
        "label-counts": whole_list(CLASSES),
        "version": text(64, default=""),
    },
)
REPLIED = Form(SAMPLES.record, SAMPLES.fields)
TRAINED = Form(NUMBERS.record, NUMBERS.fields)
# a request in an exchange by replay; the session has the limits
REQUESTED = Form("metrics", {"batch": whole(0, 2**63), "count": whole(0, 2**63), "passed": measured(0, default=0.0)})
# fewest: the smallest number of samples that a metric summarises
EVALUATED = Form("metrics", {"samples": whole(), "loss": measured(), "fewest": whole(default=None)})


def evaluated(task: Task) -> Form:
    """Return ``EVALUATED`` with the task's metrics, of which only ``task.metric`` is required."""
    ranges = task.declared()
    named = {name: measured(*ends, default=NEEDED if name == task.metric else None) for name, ends in ranges.items() if name[-1] != "-"}
    series = {name: measured(*ends) for name, ends in ranges.items() if name[-1] == "-"}
    return Form(EVALUATED.record, {**EVALUATED.fields, **named}, series)


# from the server

RUN = config(
    {
        "run": text(300, f"(?:{NAME.pattern})?", "", "a run NAME/state-XXXXXXXX"),
        "resumes": text(2**20, RESUMES, "", "TOKEN:ROUND,... with one part for each resume"),
        "durable": whole(default=0),
    }
)
EXCHANGE = config(
    {
        "exchange": one_of("grpc", "replay", "local", default=None),
        "exchange-token": text(128, default=None),
        "exchange-address": text(300, ADDRESS, default=None, wanted="HOST:PORT"),
        "exchange-authority": data(2**20, default=None),
        "exchange-timeout": number(0, default=None),
        "exchange-patience": number(0, default=None),
        "exchange-memory": whole(default=0),
        "transcript": text(2**26, default="[]"),
    }
)
SUM_OF, REPLY, EVALUATION = "secagg-of", "reply", "evaluation"  # the kinds of secure sums
WEIGHED = ("secagg-update-weight", "secagg-statistics-weight", "secagg-samples-weight")
SECURE = config(
    {
        SUM_OF: one_of(REPLY, EVALUATION, default=REPLY),
        **dict.fromkeys(WEIGHED, whole(default=None)),
        "dp-clip": number(0, default=None),
        "dp-statistics-clip": number(0, default=None),
        "dp-noise": number(0, default=None),
    }
)
HISTORY_ROUNDS, HISTORY_HASHES = "secagg-rounds", "secagg-told"  # rounds, and a hash of each one's instruction: see secagg.instructions
ROUNDS = 2**16  # the most rounds in a history
HASHES = {HISTORY_ROUNDS: wholes(ROUNDS, default=None), HISTORY_HASHES: data(32 * ROUNDS, default=None)}
WEIGHTS = config(dict.fromkeys(WEIGHED, whole()))  # in messages that ask for a masked vector
COMBINED_HISTORY = config(HASHES)
NOISE = config({"dp-clip": number(0), "dp-statistics-clip": number(0), "dp-noise": number(0)})
TO_TRAIN = config(
    {
        "learning-rate": number(0),
        "rate-share": number(0, 1, default=1.0),
        "objective": text(1000, default=""),
        "counted": whole(default=None),
    }
).and_also(RUN, EXCHANGE, SECURE)
TO_MEASURE = RUN.and_also(config({"measured": one_of(*MEASURED, default=INPUTS)}), EXCHANGE, SECURE)
TO_SAVE = RUN.and_also(Form("config", {"save": text(255, FOLDER, wanted="a file name")}))
TO_EVALUATE = TO_TELL = RUN
TO_MEET = EXCHANGE

LAYOUT = Form("config", {"layout": text(2**24)})  # the layout of the arrays for ``NumPyClient``; it never comes from another machine

# secure aggregation, stage by stage; secagg.workflow and secagg.client check what depends on earlier stages

PLAN = Form("plan", {"samples": whole(), "passes": whole(), "steps": whole()})
OWN_HISTORY = Form("told", HASHES)
KEYS = Form(RECORD_KEY_CONFIGS, {"pk1": data(KEY, 1), "pk2": data(KEY, 1)}, prefix="")
SHARES_OUT = Form(RECORD_KEY_CONFIGS, {"dsts": wholes(NODES), "ctxts": blobs(NODES, SHARE)}, prefix="")
MASKED = Form(RECORD_KEY_CONFIGS, {"masked_params": blobs(2, 2**40)}, prefix="")  # ``secagg.workflow`` checks the vector's size
SHA256 = text(64, "[0-9a-f]{64}", wanted="64 hexadecimal digits")
RESULT = Form("fitres.metrics", {"activations": wholes_by_name(LAYERS), "digest": SHA256}, prefix="")  # digest: of the instruction
SHARES_BACK = Form(RECORD_KEY_CONFIGS, {"nids": wholes(NODES), "shares": blobs(NODES, SHARE)}, prefix="")

SET_UP = Form(
    RECORD_KEY_CONFIGS,
    {
        "stage": text(32),
        "sample_num": whole(1, NODES),
        "share_num": whole(1, NODES),
        "threshold": whole(1, NODES),
        "clipping_range": real(FINEST, WIDEST),
        "target_range": whole(2**4, 2**30),
        "mod_range": whole(1),
        "max_weight": real(0),
        "cohort": wholes(NODES),
    },
    prefix="",
)
SHARE_KEYS = Form(RECORD_KEY_CONFIGS, {"stage": text(32)}, others=True, prefix="")  # the others: keys by node
COLLECT = Form(RECORD_KEY_CONFIGS, {"stage": text(32), "srcs": wholes(NODES), "ctxts": blobs(NODES, SHARE)}, prefix="")
UNMASK = Form(RECORD_KEY_CONFIGS, {"stage": text(32), "active_nids": wholes(NODES), "dead_nids": wholes(NODES)}, prefix="")

# from the site itself: its node config, including its policy

LIMITS = Form("node config", dict.fromkeys(("min-samples", "max-evaluations", "max-unknown-rounds"), whole(default=None)))

# the versions of both sides

ADVICE = 'install the server\'s version at every site (docs, "Upgrade the server and its sites")'


@cache
def here() -> str:
    """Return the version of fl-bn that is installed here, read once per process, as that is slow."""
    return version_of("fl-bn")


def greeting() -> RecordDict:
    """Return the content of the message that asks a client to introduce itself."""
    return RecordDict({"config": ConfigRecord({"server-round": 0})})


def client_differs(theirs: str) -> str:
    """Return, at the server, why a client with the version ``theirs`` cannot take part. Empty if it can."""
    version = f"fl-bn {printable(theirs)}" if theirs else "an earlier fl-bn, which names no version"
    return "" if theirs == here() else f"it has {version}, and the server {here()}: {ADVICE}"
