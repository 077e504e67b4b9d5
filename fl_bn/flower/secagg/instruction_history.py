"""Record a client's earlier instructions. For a secure sum, all clients of an earlier round must have had the same instruction.

The masks of a sum depend on the instruction of its own round (``instruction_digest``). But a client's state,
such as its BatchNorm layers under FedBN, comes from earlier rounds. A dishonest server could have sent all
clients but one an instruction that makes their later updates vanish. The sum would then reveal the one
client's update.

So each client stores, with its state, a hash of its instruction in every round that formed the state. It
sends these hashes before a sum. The server combines the hashes of all clients, and sends the result to
everyone with the model. The masks depend on this result, too. A client refuses to take part if its own hashes
are not in the result.

A client cannot check rounds in which it took no part. A site may limit the number of such rounds
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
from fl_bn.flower.wire.messages import HISTORY_HASHES, HISTORY_ROUNDS
from fl_bn.support.wire import WireError, excerpt

_now: ContextVar[bytes] = ContextVar("hash of this round's instruction", default=b"")
SECTION, SIZE = "told", 32  # the section of a client's state with the hashes; the number of bytes of a hash
History = dict[int, bytes]
"""A hash of the instruction, by round."""


def history_of(kept: ClientState) -> History:
    """Return round -> the hash of that round's instruction, as stored in a client's state."""
    if not (tensors := kept.get(SECTION)):
        return {}
    return {int(round): bytes(row.tolist()) for round, row in zip(tensors["rounds"].tolist(), tensors["hashes"], strict=True)}


@contextmanager
def telling(digest: bytes) -> Iterator[None]:
    """Let ``to_write`` add ``digest``, the hash of this round's instruction, to the client's state inside the block."""
    token = _now.set(digest)
    try:
        yield
    finally:
        _now.reset(token)


def to_write(keeps: ClientState, before: ClientState, round: int) -> dict[str, dict[str, Tensor]] | None:
    """Return the sections that a client stores after ``round``. None: it stores nothing.

    In a round with a secure sum (inside a ``telling`` block), these sections include the history. The client sends the history
    to the server before each sum. If the client's new tensors are not finite, it keeps its old tensors, but still stores a
    history that includes this round. If the round were missing in the history, the server would learn that the new
    tensors were not finite.

    Args:
        keeps: the state at the end of the round.
        before: the state at the start of the round.
        round: the round's number.
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
    """Return the fields of a message that hold ``history``. An empty history has no fields."""
    rounds = sorted(history)
    return {HISTORY_ROUNDS: rounds, HISTORY_HASHES: b"".join(history[round] for round in rounds)} if rounds else {}


def from_config(record: ConfigRecord | Mapping[str, object] | None, form: Form) -> History:
    """Read a history from a message.

    Args:
        record: the message's record with the history. None: the message has none, and the history is empty.
        form: the form of this record: its name and its fields.

    Raises:
        WireError: a field has a wrong type, a round is listed twice, or there is not one hash for each round.
    """
    values = form.read({} if record is None else dict(record))
    rounds, hashes = values.get(HISTORY_ROUNDS, []), values.get(HISTORY_HASHES, b"")
    if len(set(rounds)) != len(rounds):
        raise WireError(form.record, HISTORY_ROUNDS, f"expected each round once, but got rounds {excerpt(rounds)}")
    if len(hashes) != SIZE * len(rounds):
        raise WireError(
            form.record, HISTORY_HASHES, f"expected a hash of {SIZE} bytes for each of {len(rounds)} rounds, but got {len(hashes)} bytes"
        )
    return {round: hashes[SIZE * at : SIZE * (at + 1)] for at, round in enumerate(rounds)}


def put_together(histories: Mapping[int, History]) -> tuple[History, dict[int, int]]:
    """Combine the histories of all clients.

    Returns:
        First, round -> the hash that most clients have. Second, client -> the first round in which it has another
            hash. If the two most frequent hashes of a round are equally frequent, nobody knows which is right. Then the
            first part lacks the round, and the second part has all clients that reported a hash of it.
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
    """Return why a client must not take part in a secure sum. Empty: the client may take part.

    Args:
        kept: the client's state.
        together: the combined history of all clients.
        most_unknown: the largest allowed number of rounds that are in ``together``, but not in this client's own history.
            The client took no part in these rounds, and cannot check them. None: any number.
    """
    own = history_of(kept)
    if kept.sections and kept.round not in own:
        return (
            f"this client's state is of round {kept.round}, which had no secure sum, so this client does not know the others' instructions"
        )
    for round, digest in sorted(own.items()):
        if together.get(round) != digest:
            return f"the others got another instruction in round {round} than this client, so their vectors might not hide this client's"
    unknown = sorted(together.keys() - own.keys())
    if most_unknown is not None and len(unknown) > most_unknown:
        return (
            f"this site allows max-unknown-rounds = {most_unknown}, but the others' states come from rounds {excerpt(unknown)}, "
            "in which it took no part"
        )
    return ""
