"""Hash the instructions of a client. Its masks depend on the hash, and its state keeps the earlier ones.

A dishonest server could send weights of 2^53 to all clients but one. Their vectors
would vanish from the sum by rounding, and the sum would reveal the one client's
vector. With the hash in the keys, the masks of clients with different instructions
do not cancel, and the sum consists of random numbers.

The hash covers:

* the set-up of SecAgg+: clients, shares, threshold, clipping range, levels,
  modulus, weight, cohort,
* the header: method, phase, round, signature of the model, format, dtype of the
  payload,
* the config: the weights of the sum, the learning rate, the clips and the noise,
  and undeclared fields,
* the instructions in the rounds that formed the clients' states,
* all arrays: names, dtypes, shapes, bytes,
* the run config, which decides how a client trains.

It leaves out values that differ between the clients of an honest server, and cannot
make one vector stand out: ``counted`` (the last round in which the client's own
reply changed the model), the keys and shares of its neighbours, and its node
config. False keys or shares make masks that do not cancel either.

A client's state, such as its BatchNorm layers under FedBN, comes from earlier
rounds. In these, a dishonest server could have sent the others an instruction that
makes their later updates vanish. So each client stores a hash of its instruction in
every round that formed its state, and sends these before a sum. The server combines
the hashes of all clients, and sends the result to everyone with the model. The
masks depend on it, too. A client refuses to take part if its own hashes are not in
the result.

A client cannot check rounds in which it took no part; a site may limit their number
(``max-unknown-rounds``).
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message

from fl_bn.federation.values import ClientState, Sections
from fl_bn.flower.wire import messages
from fl_bn.flower.wire.codec import OURS, Form, decoded, records_of
from fl_bn.flower.wire.messages import HISTORY_HASHES, HISTORY_ROUNDS
from fl_bn.support.wire import WireError, excerpt

PER_CLIENT = ("counted",)  # fields of the config that honest servers set for each client
OF_ONE_SUM = (*PER_CLIENT, *messages.WEIGHED, HISTORY_ROUNDS, HISTORY_HASHES)
SET_UP = tuple(name for name in messages.SET_UP.fields if name != "stage")  # fields of the client's state after the first stage
SECTION, SIZE = "told", 32  # the section of a client's state with the hashes; the number of bytes of a hash
History = dict[int, bytes]
"""A hash of the instruction, by round."""


def instruction_digest(message: Message, run_config: Mapping[str, Any], state: Any) -> bytes:
    """Hash this client's instruction to send a masked vector: 32 bytes, equal for equal instructions.

    ``state`` is that of SecAgg+. An unreadable array raises ``WireError``.
    """
    return _digest([_text({name: getattr(state, name) for name in SET_UP}), *_parts(message, run_config, PER_CLIENT)])


def training_digest(message: Message, run_config: Mapping[str, Any]) -> bytes:
    """Hash the part of a training instruction that decides the client's state at the end of the round.

    Fields of a single attempt at the sum, such as its weights, are left out: if a
    client is lost, the sum is tried again with other values.
    """
    return _digest(_parts(message, run_config, OF_ONE_SUM))


def _digest(parts: Iterable[bytes]) -> bytes:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()


def _parts(message: Message, run_config: Mapping[str, Any], without: Collection[str]) -> Iterator[bytes]:
    yield _text(run_config)
    for name, record in sorted(records_of(message.content, ConfigRecord).items()):
        if name != messages.RECORD_KEY_CONFIGS:
            yield name.encode()
            yield _text({key: value for key, value in record.items() if name != f"{OURS}config" or key not in without})
    for name, arrays in sorted(records_of(message.content, ArrayRecord).items()):
        yield name.encode()
        for key, array in sorted(arrays.items()):
            values = decoded(array, name, key)
            yield _text({"name": key, "dtype": str(values.dtype), "shape": list(values.shape)})
            yield np.ascontiguousarray(values).tobytes()


def _text(values: Mapping[str, Any]) -> bytes:
    return json.dumps(dict(values), sort_keys=True, default=_written).encode()


def _written(value: Any) -> dict[str, str]:
    """Return {type name: text} for a value that JSON lacks. Different values differ in text."""
    return {type(value).__name__: value.hex() if isinstance(value, bytes) else repr(value)}


def history_of(kept: ClientState) -> History:
    """Return the hashes of each round's instruction in a client's state."""
    tensors = kept.get(SECTION) or {"rounds": torch.empty(0), "hashes": torch.empty(0)}
    return {int(round): bytes(row.tolist()) for round, row in zip(tensors["rounds"].tolist(), tensors["hashes"], strict=True)}


def with_history(digest: bytes, keeps: ClientState, before: ClientState, round: int) -> Sections:
    """Return what a client stores after a ``round`` with a secure sum: its own tensors, and the history.

    If the new tensors are not finite, the client keeps the old ones. Its history
    has this round all the same, since otherwise it would tell the server that they
    were not finite.
    """
    if keeps.round == round and not keeps.sections:
        return {}
    history = history_of(before) | {round: digest}
    hashes = torch.tensor([list(history[number]) for number in sorted(history)], dtype=torch.uint8)
    return {**keeps.sections, SECTION: {"rounds": torch.tensor(sorted(history)), "hashes": hashes}}


def to_config(history: History) -> dict[str, list[int] | bytes]:
    """Return the fields of a message that hold ``history``, if it is not empty."""
    rounds = sorted(history)
    return {HISTORY_ROUNDS: rounds, HISTORY_HASHES: b"".join(history[round] for round in rounds)} if rounds else {}


def from_config(record: Mapping[str, object] | None, form: Form, last: int) -> History:
    """Read a history, with rounds up to ``last``, from a record, or raise ``WireError``."""
    values = form.read({} if record is None else dict(record))
    rounds, hashes = values.get(HISTORY_ROUNDS, []), values.get(HISTORY_HASHES, b"")
    if len(set(rounds)) != len(rounds) or not all(1 <= round <= last for round in rounds):
        raise WireError(form.record, HISTORY_ROUNDS, f"expected each of rounds 1..{last} once at most, but got {excerpt(rounds)}")
    if len(hashes) != SIZE * len(rounds):
        problem = f"expected a hash of {SIZE} bytes for each of {len(rounds)} rounds, but got {len(hashes)} bytes"
        raise WireError(form.record, HISTORY_HASHES, problem)
    return {round: hashes[SIZE * at : SIZE * (at + 1)] for at, round in enumerate(rounds)}


def put_together(histories: Mapping[int, History]) -> tuple[History, dict[int, int]]:
    """Combine the histories of all clients.

    Return each round's most frequent hash, and for each client the first round in
    which it has another one. If two hashes of a round are equally frequent, the
    first part lacks the round, and the second has all clients that reported a hash
    of it.
    """
    together: History = {}
    at_odds: dict[int, int] = {}
    for round in sorted({round for history in histories.values() for round in history}):
        hashes = {client: history[round] for client, history in histories.items() if round in history}
        (usual, votes), *others = Counter(hashes.values()).most_common()
        if not others or others[0][1] < votes:
            together[round] = usual
        at_odds = {client: round for client, own in hashes.items() if own != together.get(round)} | at_odds
    return together, at_odds


def problem(kept: ClientState, together: History, most_unknown: int | None = None) -> str:
    """Return why a client must not take part in a secure sum. Empty: it may.

    Up to ``most_unknown`` rounds of the combined history may be without this
    client. None: any number.
    """
    own = history_of(kept)
    if kept.sections and kept.round not in own:
        return f"this client's state is of round {kept.round}, which had no secure sum: the others' instructions are unknown"
    for round, digest in sorted(own.items()):
        if together.get(round) != digest:
            return f"the others got another instruction in round {round} than this client, so their vectors might not hide this client's"
    unknown = sorted(together.keys() - own.keys())
    if most_unknown is not None and len(unknown) > most_unknown:
        return f"this site allows max-unknown-rounds = {most_unknown}, but took no part in rounds {excerpt(unknown)} of the others' states"
    return ""
