"""Copy networks deeply, also those that hold tensors which a computation made."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from fl_bn.bn.kinds import Unconvertible

M = TypeVar("M", bound=nn.Module)


def copied(model: M) -> M:
    """Copy a network deeply.

    ``copy.deepcopy`` refuses tensors that a computation made, such as those of ``nn.utils.weight_norm``. The copy
    gets them as constants. A tensor whose entries share memory (``expand``) becomes writable. Functions are not
    copied: a lambda in an attribute calls the original network (docs/how-to/network.md).

    Raises:
        Unconvertible: The network cannot be copied.
    """
    memo: dict[int, Any] = {}
    for module in model.modules():
        for tensor in _tensors(list(vars(module).values())):
            if not tensor.is_leaf or (_shares_entries(tensor) and not isinstance(tensor, nn.Parameter)):
                memo[id(tensor)] = tensor.detach().clone()
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:  # whatever the user's class raises
        raise Unconvertible(
            f"the network cannot be copied, and fl-bn trains a copy of it ({type(error).__name__}: {error}): make what cannot be copied in "
            "forward, or give its class a method __deepcopy__"
        ) from error


def _shares_entries(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and any(step == 0 and size > 1 for step, size in zip(tensor.stride(), tensor.shape, strict=True))


def _tensors(value: object, depth: int = 4) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif depth and isinstance(value, list | tuple | dict):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _tensors(one, depth - 1)
