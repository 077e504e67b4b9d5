"""Check every message to a client's app before a handler answers it, and every reply before it is sent.

The gate is a Flower mod (``Gate``) around all handlers of an app. It knows the
kinds of messages, the site's policy, and how often this client has evaluated. For a
new handler, declare here what its replies may hold.

``secure-aggregation`` in the node config or the run config means that this client
sends no summary of its data unmasked. It introduces itself, reports its number of
samples, saves its model, takes part in secure sums, and refuses everything else.
Whether such a client fails, and with which error, may depend on its data, so it
reports a failure without a reason. After ``MOST_FAILURES`` failures it takes part
in no further secure sum of the run.

A server that chooses the weights can make the accuracy answer any yes-or-no
question about the samples. So ``max-evaluations`` limits the number of evaluations
in a run. ``min-samples`` is the smallest number of samples that a metric may
summarise.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord

from fl_bn.flower.compat import log
from fl_bn.flower.disclosure import FEW
from fl_bn.flower.wire.codec import OURS, config_of, records_of
from fl_bn.flower.wire.messages import EVALUATION, EXCHANGE, LIMITS, RECORD_KEY_CONFIGS, REQUIRED, SECURE, SUM_OF
from fl_bn.methods import Phase
from fl_bn.support.durable import append
from fl_bn.support.wire import WireError, excerpt, printable

Handler = Callable[[Message, Context], Message]
COUNTS = ("samples", "num-examples", "num_examples", "fewest")
"""An evaluation's metrics that say how many samples the others summarise."""
SPENT = "evaluations"  # name of a folder below state-dir; with ``OURS`` before it, of a record in Flower's context.state
FAILURES, MOST_FAILURES = f"{OURS}failures", 3
MASKING = "collect_masked_vectors"  # Flower's name of the stage whose reply depends on the data
HIDDEN = "this client could not answer; its own log says why"
_entered: ContextVar[bool] = ContextVar("entered", default=False)


class Refused(ValueError):
    """Signal that this client refuses a message, or that its reply may not leave."""


class Insecure(Refused):
    """Signal that the server asked for a reply that would reveal one client's numbers."""


@dataclass(frozen=True)
class Kind:
    """Describe a kind of message, and which config and metric ``records`` the reply may have.

    Even a client that requires secure aggregation answers an ``open`` one, whose
    replies hold no unmasked summary of its data.
    """

    records: frozenset[str] = frozenset()
    arrays: bool = False
    open: bool = False


OWN_METRICS = "metrics"  # the user's record of a train or evaluate handler of their own, by Flower's custom
PLAIN = frozenset({f"{OURS}header", f"{OURS}metrics"})
KINDS = {
    "train": Kind(PLAIN | {OWN_METRICS}, arrays=True),
    "evaluate": Kind(PLAIN | {OWN_METRICS}),
    "query.statistics": Kind(PLAIN, arrays=True),
    "query.kept": Kind(PLAIN, arrays=True),
    "query.hello": Kind(frozenset({f"{OURS}hello"}), open=True),
    "query.rendezvous": Kind(),
    "query.save": Kind(open=True),
}
OF_A_SUM = {RECORD_KEY_CONFIGS, f"{OURS}plan", f"{OURS}told", "fitres.metrics", "fitres.num_examples", "fitres.status"}
SUM = Kind(frozenset(OF_A_SUM), open=True)
"""A stage of a secure sum. Flower's mod leaves an empty record beside the vector."""


@dataclass(frozen=True)
class Limits:
    """Hold the limits that a site sets in its node config. None: any number.

    Attributes:
        secure: whether the site requires secure aggregation.
        min_samples: the smallest number of samples behind a metric of an
            evaluation.
        max_evaluations: the largest number of evaluations in a run.
        unknown_rounds: for a secure sum, the largest number of rounds without this
            client that formed the other clients' states.
    """

    secure: bool
    min_samples: int
    max_evaluations: int | None
    unknown_rounds: int | None = None

    @classmethod
    def of(cls, context: Context) -> Limits:
        """Read the limits from the node config and, for ``secure``, the run config, or raise ``WireError``."""
        given = {"min-samples": 0, **LIMITS.read(context.node_config)}
        secure = any(bool(config.get(REQUIRED, False)) for config in (context.node_config, context.run_config))
        return cls(secure, max(given["min-samples"], FEW if secure else 0), given.get("max-evaluations"), given.get("max-unknown-rounds"))


@dataclass(frozen=True)
class Gate:
    """Check an app's messages and replies, as a Flower mod: ``ClientApp(mods=[Gate()])``.

    ``kinds`` are those of messages that the app answers, by Flower's message type.
    Default: fl-bn's own app's.
    """

    kinds: Mapping[str, Kind] = field(default_factory=lambda: KINDS)

    def __call__(self, message: Message, context: Context, handle: Handler) -> Message:
        """Check ``message``, call ``handle`` to answer it, and return the reply if it passes the checks.

        Raises:
            Refused: the client must not answer, the reply holds more than it may,
                or ``handle`` failed for a reason that must be hidden.
            WireError: a limit in the node config is no whole number of at least 0.
            Exception: whatever else ``handle`` raises.
        """
        name, limits = message.metadata.message_type, Limits.of(context)
        kind = SUM if RECORD_KEY_CONFIGS in message.content else self.kinds.get(name, Kind())
        if why := self._refusal(message, context, kind, limits):
            raise Refused(why)
        # before Flower's mod takes the stage out
        masks = kind is SUM and config_of(message.content, RECORD_KEY_CONFIGS).get("stage") == MASKING
        token = _entered.set(True)
        try:
            reply = handle(message, context)
        except Exception as error:
            if limits.secure:
                _hide(error, masks, context)
            raise
        finally:
            _entered.reset(token)
        if reply.has_error():
            why = HIDDEN if limits.secure else ""  # the handler chose the words of this error
        else:
            why = _excess(reply, name, kind, limits)
            summed = kind is SUM and sums_evaluations(message) and "masked_params" in config_of(reply.content, RECORD_KEY_CONFIGS)
            if not why and (summed or (kind is not SUM and name.startswith("evaluate"))):
                why = _spend(context, limits)
        if why:
            raise Refused(why)
        return reply

    def _refusal(self, message: Message, context: Context, kind: Kind, limits: Limits) -> str:
        """Return why this client must not answer ``message``. Empty if it may."""
        name, exchange = message.metadata.message_type, _exchange(message)
        if name not in self.kinds:
            return f"this client's gate knows no {printable(name)} messages, so it answers none of them: add the type to Gate(kinds=...)"
        if kind is SUM and name != "train":  # Flower's mod would let this pass, and the vector would leave unmasked
            return f"SecAgg+ masks only replies to train messages, but this message has the type {name}: its reply would not be masked"
        if limits.secure and not kind.open:
            return f"{REQUIRED} is on, so this client answers no {name} message in the clear"
        if kind is SUM and limits.secure and _failures(context) >= MOST_FAILURES:
            return f"this client failed in {MOST_FAILURES} secure sums of this run, and takes part in no more: its data may be the reason"
        if exchange and (kind is SUM or limits.secure):
            return f"{exchange} would show this client's moments to the server, and no secure sum needs such an exchange"
        return ""


def _hide(error: Exception, masks: bool, context: Context) -> None:
    """Raise ``Refused`` without a reason, if secure aggregation must hide it."""
    if isinstance(error, Refused) or (isinstance(error, WireError) and not masks):
        return  # a WireError depends on the message only, except for one of the vector to mask
    log(logging.ERROR, "this client does not answer, and does not tell the server why: %r", error)
    if masks:
        context.state[FAILURES] = ConfigRecord({"failed": _failures(context) + 1})
    raise Refused(HIDDEN) from None


def admit_own(message: Message, context: Context, evaluates: bool) -> None:
    """Check that a user's own handler may answer a message, before it does, or raise ``Refused``.

    Its reply is not masked, so a client that requires secure aggregation refuses.
    An evaluation is counted here, since without a ``Gate`` nothing checks the
    reply.
    """
    why, limits = "", Limits.of(context)
    if limits.secure:
        why = f"{REQUIRED} is on, but a user's own app replies unmasked: use fl-bn's application, or set {REQUIRED} to false"
    if not why and evaluates and not _entered.get():
        why = _spend(context, limits)
    if why:
        raise Refused(why)


def evaluations_left(context: Context, limits: Limits) -> bool:
    """Return whether this client may answer one more evaluation in this run."""
    return limits.max_evaluations is None or _spent(context) < limits.max_evaluations


def _spend(context: Context, limits: Limits) -> str:
    """Count one more of this client's evaluations of the run, or return why it may not answer.

    It is counted before the result is sent. ``state-dir`` keeps the count over
    restarts.
    """
    most, file = limits.max_evaluations, _file(context)
    if most is None:
        return ""
    if evaluations_left(context, limits) and file is not None:
        try:
            append(file, b"1\n")
        except OSError as error:
            return f"this site cannot count its evaluations ({error}), so it answers none"
        if _spent(context) <= most:  # another process may have counted one, too
            return ""
    elif evaluations_left(context, limits):
        context.state[OURS + SPENT] = ConfigRecord({"spent": _spent(context) + 1})
        return ""
    return f"this site has answered the {most} evaluations that it allows in a run (max-evaluations): more could reveal single samples"


def enough(metrics: Mapping[str, float], samples: int, behind: Mapping[str, int], least: int) -> tuple[dict[str, float], int]:
    """Withhold metrics that summarise fewer than ``least`` samples: they become NaN.

    Return the metrics, and the smallest number of samples behind one that is not
    withheld; ``samples`` if all are. ``behind`` has the numbers of some metrics, by
    name; all others summarise ``samples``.
    """
    counts = {name: behind.get(name, samples) for name in metrics}
    kept = {name: value if counts[name] >= least else math.nan for name, value in metrics.items()}
    return kept, min((counts[name] for name in kept if counts[name] >= max(least, 1)), default=samples)


def _exchange(message: Message) -> str:
    """Name the layer-wise exchange that a message starts, if any."""
    if (carrier := config_of(message.content, EXCHANGE.name).get("exchange")) is not None:
        return f"a layer-wise exchange ({excerpt(carrier)})"
    return "a round with a layer-wise exchange" if config_of(message.content, f"{OURS}header").get("phase") == Phase.EXCHANGE.value else ""


def sums_evaluations(message: Message) -> bool:
    """Return whether a message is of a secure sum of evaluations."""
    return RECORD_KEY_CONFIGS in message.content and SECURE.of(message.content)[SUM_OF] == EVALUATION


def _excess(reply: Message, name: str, kind: Kind, limits: Limits) -> str:
    """Return what a reply to ``name`` holds beyond ``kind`` and ``limits``."""
    arrays = records_of(reply.content, ArrayRecord)
    if others := {*reply.content} - kind.records - {*arrays}:
        allowed = ", ".join(sorted(kind.records)) or "nothing"
        return f"a reply to {name} may hold {allowed}, but this one has {excerpt(sorted(others))}"
    if not kind.arrays and any(arrays.values()):
        return f"a reply to {name} may hold no arrays, but this one has {excerpt(sorted(arrays))}"
    if name.startswith("evaluate") and limits.min_samples:
        records = records_of(reply.content, MetricRecord).values()
        counts = [count for metrics in records for name in COUNTS if isinstance(count := metrics.get(name), int | float)]
        if not counts or min(counts) < limits.min_samples:
            behind = f"summarises only {min(counts):g} samples" if counts else f"has no number of samples (a metric {' or '.join(COUNTS)})"
            return f"this site has min-samples = {limits.min_samples}, but the evaluation {behind}"
    return ""


def _spent(context: Context) -> int:
    if (file := _file(context)) is None:
        return int(config_of(context.state, OURS + SPENT).get("spent", 0))
    return file.read_bytes().count(b"\n") if file.exists() else 0


def _file(context: Context) -> Path | None:
    """Return the file that counts this client's evaluations, if ``state-dir`` is set."""
    node = context.node_config
    if "state-dir" not in node:
        return None
    client = node.get("site", node.get("partition-id", context.node_id))  # a site is one client, whatever the server calls it
    return Path(str(node["state-dir"])) / SPENT / f"run-{context.run_id}.client-{client}"


def _failures(context: Context) -> int:
    return int(config_of(context.state, FAILURES).get("failed", 0))
