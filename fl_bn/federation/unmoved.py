"""Find the tensors that no client moved: in every reply, they equal what the server sent.

The server keeps its own values of such a tensor. The mean of the clients' copies can differ from them: copies in two bytes per value
(``narrow``) are rounded, and a mean of equal float64 numbers can be the number next to them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from fl_bn.federation.blocks import blocks
from fl_bn.federation.narrow import AS_THE_MODEL, EXACT, PayloadDtype
from fl_bn.federation.payload import Named

NO_TENSORS: Mapping[str, Tensor] = MappingProxyType({})


class Unmoved:
    """Compare the replies to an instruction with the tensors that the server sent.

    Args:
        sent: Name -> the server's own tensor. It must not change before the last comparison.
        rounding: The rounding of the tensors that clients received.
    """

    def __init__(self, sent: Named | Mapping[str, Tensor] = NO_TENSORS, rounding: PayloadDtype = EXACT) -> None:
        self._sent, self._rounding = sent, rounding
        self._names = {name for name, tensor in sent.items() if not tensor.is_meta}

    def add(self, reply: Named) -> None:
        """Compare one more reply (name -> tensor)."""
        self._names = self._same(self._names, reply)

    def after(self, replies: Sequence[Named]) -> set[str]:
        """Return the names of the tensors that no added reply moved, and none of ``replies``. These are not added."""
        names = self._names
        for reply in replies:
            names = self._same(names, reply)
        return set(names)

    def _same(self, names: set[str], reply: Named) -> set[str]:
        return {name for name in names if name in reply and self._equal(name, reply[name])}

    def _equal(self, name: str, got: Tensor) -> bool:
        """Tell whether ``got`` has the values that were sent. The first block with another value ends the comparison."""
        sent, got = self._sent[name].reshape(-1), got.reshape(-1)
        rounds = self._rounding.dtype != AS_THE_MODEL and name in self._rounding.tensors
        narrow = getattr(torch, self._rounding.dtype) if rounds else sent.dtype
        return all(torch.equal(sent[block].to(narrow).to(sent.dtype), got[block]) for block in blocks(sent.numel()))
