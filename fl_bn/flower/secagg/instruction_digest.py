"""Hash a client's instruction before the client masks its vector: the key of every mask depends on the hash.

A server could send one client one instruction and the others another. With weights of 2^53, for example, the
others' vectors vanish from the sum, so that the sum is the one client's vector. With this hash in the keys, the
masks of clients with different instructions do not cancel, and the sum is noise. These are hashed:

* the set-up of SecAgg+: the number of clients, of shares, the threshold, clipping range, levels, modulus,
weight, and the cohort's nodes,
* the header: method, phase, round, signature of the model, format, type of the payload,
* the config, with the weights of the sum, the learning rate, the clips and the noise, and with undeclared
fields,
* the instructions to all clients in the rounds that formed their states (``instruction_history``),
* all arrays: names, types, shapes, bytes,
* the run config, which decides how a client trains.

Values that may differ from client to client are left out. They cannot make one client's vector stand out. These
are ``counted`` (the client's own state to go on from), the keys and shares of its neighbours (masks that do not
fit do not cancel either), and its own node config.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message

from fl_bn.flower.wire.codec import decoded
from fl_bn.flower.wire.fields import OURS, records_of
from fl_bn.flower.wire.messages import HISTORY_HASHES, HISTORY_ROUNDS, RECORD_KEY_CONFIGS, WEIGHED

PER_CLIENT = ("counted",)  # fields of the config that honest servers set for each client
OF_ONE_SUM = (*PER_CLIENT, *WEIGHED, HISTORY_ROUNDS, HISTORY_HASHES)
SET_UP = (
    "sample_num",
    "share_num",
    "threshold",
    "clipping_range",
    "target_range",
    "mod_range",
    "max_weight",
    "cohort",
)  # fields of the client's state, as the first stage left them


def instruction_digest(message: Message, run_config: Mapping[str, Any], state: Any) -> bytes:
    """Hash this client's instruction.

    Args:
        message: the instruction to send a masked vector.
        run_config: the run config, as this client has it.
        state: this client's state of SecAgg+, with the fields ``SET_UP``.

    Returns:
        32 bytes, the same at every client with the same instruction.

    Raises:
        WireError: an array cannot be read.
    """
    return _digest([_text({name: getattr(state, name) for name in SET_UP}), *_parts(message, run_config, PER_CLIENT)])


def training_digest(message: Message, run_config: Mapping[str, Any]) -> bytes:
    """Hash the part of a training instruction that decides the state in which this client ends the round.

    Left out are the fields of a single attempt at the secure sum, such as its weights. If a client drops out, the
    sum is tried again with other such fields, and the clients' states stay the same.
    """
    return _digest(_parts(message, run_config, OF_ONE_SUM))


def _digest(parts: Iterable[bytes]) -> bytes:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()


def _parts(message: Message, run_config: Mapping[str, Any], without: Collection[str]) -> Iterator[bytes]:
    """Yield the parts to hash; ``without`` are the fields of the config that are left out."""
    yield _text(run_config)
    for name, record in sorted(records_of(message.content, ConfigRecord).items()):
        if name != RECORD_KEY_CONFIGS:
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
    """Return a text for a value that JSON cannot represent, different from every other value's."""
    return {type(value).__name__: value.hex() if isinstance(value, bytes) else repr(value)}
