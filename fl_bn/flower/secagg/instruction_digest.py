"""Hash a client's instruction. The keys of the client's masks depend on this hash.

A dishonest server could give one client another instruction than the others. For example, it could send weights of
2^53 to all others. Their vectors would then vanish from the sum by rounding, and the sum would reveal the one
client's vector. With the hash in the keys, the masks of clients with different instructions do not cancel. The sum
then consists of random numbers.

The hash covers:

* the set-up of SecAgg+: the number of clients and shares, the threshold, clipping range, levels, modulus, weight,
  and the cohort's nodes,
* the header: method, phase, round, signature of the model, format, dtype of the payload,
* the config: the weights of the sum, the learning rate, the clips and the noise, and undeclared fields, too,
* the instructions in the rounds that formed the clients' states (``instruction_history``),
* all arrays: names, dtypes, shapes, bytes,
* the run config, which decides how a client trains.

Values that differ between clients even if the server is honest are left out. They cannot make one client's
vector stand out. These are ``counted`` (the last round in which the client's own reply changed the model), the keys
and shares of its neighbours, and its own node config. False keys or shares make masks that do not cancel either.
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
)  # fields of the client's state after the first stage


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
    """Hash the part of a training instruction that decides the client's state at the end of the round.

    The fields of a single attempt at the secure sum, such as its weights, are left out. If a client is lost,
    the sum is tried again with other values of these fields, and the clients' states stay the same.

    Args:
        message: the training instruction.
        run_config: the run config, as this client has it.

    Returns:
        32 bytes.

    Raises:
        WireError: an array cannot be read.
    """
    return _digest(_parts(message, run_config, OF_ONE_SUM))


def _digest(parts: Iterable[bytes]) -> bytes:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()


def _parts(message: Message, run_config: Mapping[str, Any], without: Collection[str]) -> Iterator[bytes]:
    """Yield the parts to hash. ``without`` names fields of the config that are left out."""
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
    """Return {type name: text} for a value that JSON cannot represent. Different values have different texts."""
    return {type(value).__name__: value.hex() if isinstance(value, bytes) else repr(value)}
