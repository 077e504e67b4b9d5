"""A hash of all that a client was told before it masks its vector: the key of every mask is made with it.

A server could tell one client one thing and the others another: weights of 2^53, say, beside which their vectors vanish from the sum, so
that the sum is the one client's vector. With this hash in the keys, the masks of clients that were told different things do not cancel, and
the sum is noise. What is hashed:

* the set-up of SecAgg+: the number of clients, of shares, the threshold, clipping range, levels, modulus, weight, and the cohort's nodes,
* the header: method, phase, round, signature of the model, format, type of the payload,
* the config, with the weights of the sum, the learning rate, the clips and the noise, and with fields that nobody declared,
* what all were told in the rounds before that made the states that clients keep (``told``),
* all arrays: names, types, shapes, bytes,
* the run config, which decides how a client trains.

What may differ from client to client is left out, and cannot make one client's vector stand out: ``counted`` (which of its own states a
client goes on from), the keys and shares of its neighbours (masks that do not fit do not cancel either), and its own node config.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message

from fl_bn.flower.wire.codec import decoded
from fl_bn.flower.wire.fields import records_of
from fl_bn.flower.wire.messages import RECORD_KEY_CONFIGS, ROUNDS_TOLD, TOLD_IN, WEIGHED

PER_CLIENT = ("counted",)  # fields of the config that honest servers set for each client
OF_ONE_SUM = (*PER_CLIENT, *WEIGHED, ROUNDS_TOLD, TOLD_IN)
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
    """Hash what this client was told.

    Args:
        message: the instruction to send a masked vector.
        run_config: the run's, as this client has it.
        state: of SecAgg+ at this client, with the fields ``SET_UP``.

    Returns:
        32 bytes, the same at every client that was told the same.

    Raises:
        WireError: an array cannot be read.
    """
    return _digest([_text({name: getattr(state, name) for name in SET_UP}), *_parts(message, run_config, PER_CLIENT)])


def training_digest(message: Message, run_config: Mapping[str, Any]) -> bytes:
    """Hash what makes the state that this client keeps after a round: all that it was told, but for what belongs to one sum.

    A sum may begin again without a client. Its set-up and its weights are others then, and what clients keep is the same.
    """
    return _digest(_parts(message, run_config, OF_ONE_SUM))


def _digest(parts: Iterable[bytes]) -> bytes:
    found = hashlib.sha256()
    for part in parts:
        found.update(len(part).to_bytes(8, "little") + part)
    return found.digest()


def _parts(message: Message, run_config: Mapping[str, Any], without: Collection[str]) -> Iterator[bytes]:
    """``without``: fields of the config that are left out."""
    yield _text(run_config)
    for name, record in sorted(records_of(message.content, ConfigRecord).items()):
        if name != RECORD_KEY_CONFIGS:
            yield name.encode()
            yield _text({key: value for key, value in record.items() if name != "config" or key not in without})
    for name, arrays in sorted(records_of(message.content, ArrayRecord).items()):
        yield name.encode()
        for key, array in sorted(arrays.items()):
            values = decoded(array, name, key)
            yield _text({"name": key, "dtype": str(values.dtype), "shape": list(values.shape)})
            yield np.ascontiguousarray(values).tobytes()


def _text(values: Mapping[str, Any]) -> bytes:
    return json.dumps(dict(values), sort_keys=True, default=_written).encode()


def _written(value: Any) -> dict[str, str]:
    """A value that JSON has no words for, so that it is no other value's."""
    return {type(value).__name__: value.hex() if isinstance(value, bytes) else repr(value)}
