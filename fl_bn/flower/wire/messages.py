"""Declare all fields of messages, in both directions, and of the files from which a run resumes.

A received value is checked by its declaration before it is used. The records' names begin with ``OURS`` (``wire.fields``).
Arrays are declared in ``schema``, by model, method and phase. Requests of the layer-wise exchange are declared in
``exchange.grpc.wire``, with their limits in ``exchange.session``. Every other value that server and client read from each
other is a field below.
"""

from __future__ import annotations

from fl_bn.federation.fields import NEEDED, blobs, data, measured, number, one_of, real, text, whole, whole_list, wholes, wholes_by_name
from fl_bn.federation.narrow import PAYLOADS
from fl_bn.federation.replies import REPLIED as SAMPLES
from fl_bn.federation.replies import TRAINED as NUMBERS
from fl_bn.flower.wire.fields import FOLDER, NAME, RESUMES, Form
from fl_bn.methods import INPUTS, MEASURED, Phase
from fl_bn.secure.settings import FINEST, WIDEST
from fl_bn.task import Task

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
        "format": text(64),
        "payload": one_of(*PAYLOADS),
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
    """Return ``EVALUATED`` with the metrics that ``task`` declares. Of these, only ``task.metric`` is required."""
    ranges = task.declared()
    fields = {name: measured(*ends, default=NEEDED if name == task.metric else None) for name, ends in ranges.items() if name[-1] != "-"}
    series = {name: measured(*ends) for name, ends in ranges.items() if name[-1] == "-"}
    return Form(EVALUATED.record, {**EVALUATED.fields, **fields}, series)


# from the server

RUN = Form(
    "config",
    {
        "run": text(300, f"(?:{NAME.pattern})?", "", "a run NAME/state-XXXXXXXX"),
        "resumes": text(2**20, RESUMES, "", "TOKEN:ROUND,... with one part for each resume"),
        "durable": whole(default=0),
        "version": text(64, default=""),
    },
    others=True,
)
EXCHANGE = Form(
    "config",
    {
        "exchange": one_of("grpc", "replay", "local", default=None),
        "exchange-token": text(128, default=None),
        "exchange-address": text(300, ADDRESS, default=None, wanted="HOST:PORT"),
        "exchange-authority": data(2**20, default=None),
        "exchange-timeout": number(0, default=None),
        "exchange-patience": number(0, default=None),
        "exchange-memory": whole(default=0),
        "transcript": text(2**26, default="[]"),
    },
    others=True,
)
SUM_OF, REPLY, EVALUATION = "secagg-of", "reply", "evaluation"  # the kinds of secure sums
WEIGHED = ("secagg-update-weight", "secagg-statistics-weight", "secagg-samples-weight")
SECURE = Form(
    "config",
    {
        SUM_OF: one_of(REPLY, EVALUATION, default=REPLY),
        **dict.fromkeys(WEIGHED, whole(default=None)),
        "dp-clip": number(0, default=None),
        "dp-statistics-clip": number(0, default=None),
        "dp-noise": number(0, default=None),
    },
    others=True,
)
HISTORY_ROUNDS, HISTORY_HASHES = "secagg-rounds", "secagg-told"  # rounds, and a hash of each one's instruction: see secagg.instructions
ROUNDS = 2**16  # the most rounds in a history
HASHES = {HISTORY_ROUNDS: wholes(ROUNDS, default=None), HISTORY_HASHES: data(32 * ROUNDS, default=None)}
WEIGHTS = Form("config", dict.fromkeys(WEIGHED, whole()), others=True)  # in messages that ask for a masked vector
COMBINED_HISTORY = Form("config", HASHES, others=True)
NOISE = Form("config", {"dp-clip": number(0), "dp-statistics-clip": number(0), "dp-noise": number(0)}, others=True)
TO_TRAIN = Form(
    "config",
    {
        "learning-rate": number(0),
        "rate-share": number(0, 1, default=1.0),
        "objective": text(1000, default=""),
        "counted": whole(default=None),
    },
    others=True,
).and_also(RUN, EXCHANGE, SECURE)
TO_MEASURE = RUN.and_also(Form("config", {"measured": one_of(*MEASURED, default=INPUTS)}, others=True), EXCHANGE, SECURE)
TO_EVALUATE = RUN.and_also(Form("config", {"save": text(255, f"(?:{FOLDER})?", "", "a file name")}))
TO_SAVE = RUN.and_also(Form("config", {"save": text(255, FOLDER, wanted="a file name")}))
TO_TELL = RUN
TO_MEET = EXCHANGE
TO_GREET = Form("config", {"version": text(64, default="")}, others=True)

LAYOUT = Form("config", {"layout": text(2**24)})  # the layout of the arrays for ``NumPyClient``; it never comes from another machine

# secure aggregation, stage by stage; secagg.workflow and secagg.client check what depends on earlier stages

PLAN = Form("plan", {"samples": whole(), "passes": whole(), "steps": whole()})
OWN_HISTORY = Form("told", HASHES)
KEYS = Form(RECORD_KEY_CONFIGS, {"pk1": data(KEY, 1), "pk2": data(KEY, 1)}, prefix="")
SHARES_OUT = Form(RECORD_KEY_CONFIGS, {"dsts": wholes(NODES), "ctxts": blobs(NODES, SHARE)}, prefix="")
UNREADABLE = Form(RECORD_KEY_CONFIGS, {"unreadable": wholes(NODES, default=None)}, prefix="")  # sent in place of a masked vector
MASKED = Form(RECORD_KEY_CONFIGS, {"masked_params": blobs(2, 2**40)}, prefix="")  # ``secagg.workflow`` checks the vector's size
DIGEST = Form(  # of the client's instruction
    "fitres.metrics", {"digest": text(64, "[0-9a-f]{64}", wanted="64 hexadecimal digits")}, prefix=""
)
RESULT = Form("fitres.metrics", {"activations": wholes_by_name(LAYERS)}, prefix="").and_also(DIGEST)
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

# files from which a run resumes

KEPT_FOR = Form("kept-for", {"signature": text(64), "run": text(200, default=""), "round": whole(), "previous/round": whole(default=0)})
