"""Run Flower's client mod of SecAgg+ with stronger masks.

Flower (1.25 to 1.42) reduces the 32-byte seed of a mask to the 32 bits that seed a
Mersenne Twister (``pseudo_rand_gen``). The seed of a pair of clients is base64
text, of which only 28 bits remain. The server, which removes the private masks, can
find the pairwise masks by trying all seeds.

Here a mask is the key stream of AES-256 in counter mode. Its key is the SHA-256 of
the whole seed and of the client's instruction (``instructions``). Keys, shares and
encryption are Flower's.

Flower's module is loaded a second time under another name, so its own stays
unchanged for everyone else.

References: Bell et al., Secure Single-Server Aggregation with (Poly)Logarithmic
    Overhead, CCS 2020.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from importlib import import_module
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from flwr.app import Context, Message

from fl_bn.flower.compat import SECAGG_CLIENT, SECAGG_SERVER, copy_of

_digest: ContextVar[bytes] = ContextVar("instruction digest")


@contextmanager
def bound_to(digest: bytes) -> Iterator[None]:
    """Let the masks made inside the block depend on ``digest`` (32 bytes), too."""
    token = _digest.set(digest)
    try:
        yield
    finally:
        _digest.reset(token)


def key_stream(seed: bytes, num_range: int, dimensions_list: list[tuple[int, ...]]) -> list[np.ndarray]:
    """Return masks of the given shapes, int64, uniform in ``[0, num_range)``.

    This replaces Flower's ``pseudo_rand_gen`` in a block of ``bound_to``. Seeds are
    fresh in each run of the protocol, so the counter may start at a constant.
    ``num_range`` is a power of 2, at most 2**32, else the masks would not be
    uniform.
    """
    key = hashlib.sha256(b"fl-bn/secagg/2" + _digest.get() + seed).digest()
    encryptor = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()
    masks = []
    for shape in dimensions_list:
        stream = encryptor.update(bytes(4 * math.prod(shape)))
        words = np.frombuffer(stream, dtype="<u4").astype(np.int64) & (num_range - 1)
        masks.append(words.reshape(shape))
    return masks


server_half: Any = import_module(SECAGG_SERVER)  # its functions for keys, shares and quantised numbers, wherever Flower keeps them
client_half: Any = copy_of(SECAGG_CLIENT)
if not hasattr(client_half, "pseudo_rand_gen"):
    raise ImportError(f"{SECAGG_CLIENT} makes its masks in a way that fl-bn cannot replace: install the flwr of constraints.txt")
client_half.pseudo_rand_gen = key_stream


def secagg_mod(message: Message, context: Context, call_next: Callable[[Message, Context], Message], digest: bytes = b"") -> Message:
    """Run Flower's client mod with the masks of this file. ``call_next`` makes the vector."""
    with bound_to(digest):
        reply: Message = client_half.secaggplus_mod(message, context, call_next)
    return reply
