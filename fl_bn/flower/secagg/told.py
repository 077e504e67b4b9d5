"""What a client was told in the rounds that made the state that it keeps: in a secure sum all who share a round were told the same in it.

The masks of a sum are bound to what all were told in that round (``instruction_digest``). What a client keeps (its BatchNorm layers under
FedBN, say) comes from earlier rounds. A server that told all others something else then could have made their updates vanish, and the sum
would be one client's. So a client keeps, with its state, a hash of what it was told in each round since that state began. Before a sum it
says these hashes. The server puts them together, and tells all of them to everyone along with the model, so that the masks are bound to
them, too. A client whose own hashes are not among them refuses.

A round in which a client took no part it cannot check: it was told nothing then. How many of these a site bears, it may say
(``max-unknown-rounds``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from flwr.app import ConfigRecord
from torch import Tensor

from fl_bn.federation.values import ClientState
from fl_bn.flower.wire.fields import Form
from fl_bn.flower.wire.messages import ROUNDS_TOLD, TOLD_IN
from fl_bn.support.wire import WireError, excerpt

_now: ContextVar[bytes] = ContextVar("what is told in this round", default=b"")
SECTION, SIZE = "told", 32  # of what a client keeps; bytes of a hash
History = dict[int, bytes]
"""A hash of the instruction, by round."""


def history_of(kept: ClientState) -> History:
    """Return the instructions' hashes by round, of a state."""
    if not (tensors := kept.get(SECTION)):
        return {}
    return {int(round): bytes(row.tolist()) for round, row in zip(tensors["rounds"].tolist(), tensors["hashes"], strict=True)}


@contextmanager
def telling(digest: bytes) -> Iterator[None]:
    """Let states that are kept inside the block have ``digest``, of what the client is told in this round."""
    token = _now.set(digest)
    try:
        yield
    finally:
        _now.reset(token)


def to_write(keeps: ClientState, before: ClientState, round: int) -> dict[str, dict[str, Tensor]] | None:
    """Return what a client stores after ``round``, which it began with the state ``before`` and ended with ``keeps``; None: nothing.

    Inside ``telling`` the history goes with it. It does so, too, where tensors were not finite and those before stay: else a round that is
    missing would say that they were not.
    """
    known = keeps.round == round
    if not (now := _now.get()):
        return dict(keeps.sections) if keeps.sections and known else None
    if known and not keeps.sections:
        return None  # the method keeps nothing
    history = history_of(before) | {round: now}
    hashes = torch.tensor([list(history[number]) for number in sorted(history)], dtype=torch.uint8)
    return {**keeps.sections, SECTION: {"rounds": torch.tensor(sorted(history)), "hashes": hashes}}


def to_config(history: History) -> dict[str, list[int] | bytes]:
    """Return the fields of a message that hold ``history``; none where it is empty."""
    rounds = sorted(history)
    return {ROUNDS_TOLD: rounds, TOLD_IN: b"".join(history[round] for round in rounds)} if rounds else {}


def from_config(record: ConfigRecord | Mapping[str, object] | None, form: Form) -> History:
    """Return the history in a message's ``record`` of ``form``; empty without one.

    Raises:
        WireError: there is not one hash for each round.
    """
    values = form.read({} if record is None else dict(record))
    rounds, hashes = values.get(ROUNDS_TOLD, []), values.get(TOLD_IN, b"")
    if len(hashes) != SIZE * len(rounds) or len(set(rounds)) != len(rounds):
        raise WireError(
            form.record, TOLD_IN, f"expected a hash of {SIZE} bytes for each of {len(rounds)} rounds, but got {len(hashes)} bytes"
        )
    return {round: hashes[SIZE * at : SIZE * (at + 1)] for at, round in enumerate(rounds)}


def put_together(histories: Mapping[int, History]) -> tuple[History, dict[int, int]]:
    """Return what most clients were told in each round, and a round in which a client was told something else, by client.

    Where as many say one thing as another, nobody knows which is true: all of them are at odds.
    """
    together: History = {}
    at_odds: dict[int, int] = {}
    for round in sorted({round for history in histories.values() for round in history}):
        hashes = {client: history[round] for client, history in histories.items() if round in history}
        (usual, votes), *others = Counter(hashes.values()).most_common()
        if others and others[0][1] == votes:
            at_odds |= dict.fromkeys(hashes.keys() - at_odds.keys(), round)
            continue
        together[round] = usual
        at_odds |= {client: round for client, own in hashes.items() if own != usual and client not in at_odds}
    return together, at_odds


def problem(kept: ClientState, together: History, most_unknown: int | None = None) -> str:
    """Return why a client with the state ``kept`` has no part in a sum of clients that were told ``together``; empty: it may have.

    ``most_unknown``: rounds of the others' states in which this client took no part; None: any number.
    """
    own = history_of(kept)
    if kept.sections and kept.round not in own:
        return f"what this client keeps of round {kept.round} came about in the clear, so it is not known what the others were told then"
    for round, told in sorted(own.items()):
        if together.get(round) != told:
            return f"the others were told something else in round {round} than this client, so their parts of the sum may hide nothing"
    unknown = sorted(together.keys() - own.keys())
    if most_unknown is not None and len(unknown) > most_unknown:
        return f"this site has max-unknown-rounds = {most_unknown}, but the others keep what came of rounds {excerpt(unknown)} without it"
    return ""
