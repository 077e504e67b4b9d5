"""Declare all fields of messages, in both directions.

A received value is checked by its declaration before it is used. Arrays are
declared in ``schema``, by model, method and phase, requests of the layer-wise
exchange in ``exchange.grpc.service`` and ``exchange.session``, and every other
value below.

The records ``config``, ``arrays`` and ``metrics`` belong to the user, and may have
any fields. The names of fl-bn's records begin with ``OURS``, a prefix that errors
leave out.
"""

from __future__ import annotations

from functools import cache, partial

from flwr.app import ConfigRecord, RecordDict

from fl_bn.federation.fields import (
    NEEDED,
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
from fl_bn.flower.wire.codec import FOLDER, NAME, RESUMES, Form
from fl_bn.methods import INPUTS, MEASURED
from fl_bn.secure.settings import FINEST, WIDEST
from fl_bn.support.extras import version_of
from fl_bn.support.wire import printable
from fl_bn.task import Task

ASK_HELLO, STATISTICS, RENDEZVOUS, SAVE = "query.hello", "query.statistics", "query.rendezvous", "query.save"  # kinds of messages

config = partial(Form, "config", others=True)  # a part of fl-bn's config, which may have fields of other parts

REQUIRED = "secure-aggregation"  # a key of the run config or of a client's node config: send nothing unmasked
RECORD_KEY_CONFIGS = "secaggplus_configs"  # Flower's name for SecAgg+'s record, here so that a plain run imports nothing of SecAgg+
CLASSES, LAYERS, NODES, CLIENTS = 65_536, 10_000, 10_000, 100_000  # the most entries of each kind in a message
HOST = r"(?:\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+)"
ADDRESS = rf"{HOST}:[0-9]{{1,5}}"  # of the layer-wise exchange
KEY, SHARE = 1024, 4096  # the most bytes of a public key, and of an encrypted pair of shares

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
# a request in an exchange by replay; the session has the limits
REQUESTED = Form("metrics", {"batch": whole(0, 2**63), "count": whole(0, 2**63), "passed": measured(0, default=0.0)})
# fewest: the smallest number of samples that a metric summarises
EVALUATED = Form("metrics", {"samples": whole(), "loss": measured(), "fewest": whole(default=None)})


def evaluated(task: Task) -> Form:
    """Return ``EVALUATED`` with the task's metrics, of which ``task.metric`` is required."""
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
NOISES = ("dp-clip", "dp-statistics-clip", "dp-noise")
SECURE = config(
    {
        SUM_OF: one_of(REPLY, EVALUATION, default=REPLY),
        **dict.fromkeys(WEIGHED, whole(default=None)),
        **dict.fromkeys(NOISES, number(0, default=None)),
    }
)
HISTORY_ROUNDS, HISTORY_HASHES = "secagg-rounds", "secagg-told"  # rounds, and a hash of each one's instruction: see secagg.instructions
ROUNDS = 2**16  # the most rounds in a history
HASHES = {HISTORY_ROUNDS: wholes(ROUNDS, default=None), HISTORY_HASHES: data(32 * ROUNDS, default=None)}
WEIGHTS = config(dict.fromkeys(WEIGHED, whole()))  # in messages that ask for a masked vector
COMBINED_HISTORY = config(HASHES)
NOISE = config(dict.fromkeys(NOISES, number(0)))
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
    """Return the version of fl-bn that is installed here, read once, as that is slow."""
    return version_of("fl-bn")


def greeting() -> RecordDict:
    """Return the content of the message that asks a client to introduce itself."""
    return RecordDict({"config": ConfigRecord({"server-round": 0})})


def client_differs(theirs: str) -> str:
    """Return why a client of version ``theirs`` cannot take part, if so."""
    version = f"fl-bn {printable(theirs)}" if theirs else "an earlier fl-bn, which names no version"
    return "" if theirs == here() else f"it has {version}, and the server {here()}: {ADVICE}"
