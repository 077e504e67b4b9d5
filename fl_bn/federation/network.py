"""Lend copies of a converted network, and store values that depend only on it (schemas)."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from functools import cached_property, partial
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from fl_bn.bn.derived import load_tensors
from fl_bn.bn.modules import copied
from fl_bn.bn.roles import inputs_like
from fl_bn.federation import schema
from fl_bn.federation.auxiliary import Auxiliary
from fl_bn.federation.gradients import centred_weights
from fl_bn.federation.schema import Locality
from fl_bn.methods import Method, Phase

AUTO = "auto"
MEMORY_FORMATS = {"contiguous": torch.contiguous_format, "channels-last": torch.channels_last}
_PLAIN = (int, float, complex, str, bytes, bool, type(None), type, Enum, torch.dtype, torch.device, torch.memory_format)
_CODE = (FunctionType, BuiltinFunctionType)
_CONTAINERS = (tuple, list, set, dict, partial)
_TORCHS = frozenset(vars(nn.Module()))  # torch's own bookkeeping: tensors, submodules, hooks, mode


class Network:
    """Lend copies of ``model``, converted for ``method``, for training and testing.

    ``model`` itself never changes. Copies are reset and lent again, so there are
    only as many as are in use at a time.
    """

    def __init__(self, model: nn.Module, method: Method, device: torch.device | None = None) -> None:
        self.original, self.method = model, method
        self.device = inputs_like(model).device if device is None else device
        self._schemas: dict[Any, schema.Schema] = {}
        self._back: list[tuple[Copy, _Pristine]] = []

    @contextmanager
    def lend(self) -> Iterator[Copy]:
        """Lend a copy of ``model`` in its state, for the block, on ``device``."""
        if self._back:
            lent, pristine = self._back.pop()
            pristine.restore()
        else:
            lent = Copy(copied(self.original).to(self.device), self)
            pristine = _Pristine(lent.model)
        try:
            yield lent
        finally:
            if pristine.knows_all:
                self._back.append((lent, pristine))

    def keep(self, most: int) -> None:
        """Delete unused copies, so that at most ``most`` of these are left."""
        del self._back[most:]

    @cached_property
    def signature(self) -> str:
        """Return the signature of model and method."""
        return self.locality.signature(self.original)

    @cached_property
    def locality(self) -> Locality:
        """Return the table of where each tensor lives."""
        return Locality.of(self.original, self.method)

    @cached_property
    def centred(self) -> list[str]:
        """Return the weights to centre in rounds with centred gradients."""
        return centred_weights(self.original)

    def instruction(self, auxiliary: Sequence[Auxiliary] = ()) -> schema.Schema:
        """Return the instruction's schema with ``auxiliary`` tensors."""
        if (key := tuple(auxiliary)) not in self._schemas:
            self._schemas[key] = schema.instruction(self.original, self.locality, key)
        return self._schemas[key]

    def reply(self, phase: Phase, update: str = "weights", auxiliary: Sequence[Auxiliary] = ()) -> schema.Schema:
        """Return the schema of a client's reply, see ``schema.reply``."""
        if (key := (phase, update, *auxiliary)) not in self._schemas:
            self._schemas[key] = schema.reply(self.original, self.locality, phase, update, auxiliary)
        return self._schemas[key]


class Copy:
    """Hold a round's model, and load tensors into it faster than ``load_state_dict`` does."""

    def __init__(self, model: nn.Module, network: Network) -> None:
        self.model, self.network = model, network
        self._slots = _slots(model)

    @classmethod
    def of(cls, model: nn.Module, method: Method) -> Copy:
        """Hold the user's ``model`` itself, already converted for ``method``."""
        return cls(model, Network(model, method))

    @property
    def state(self) -> dict[str, Tensor]:
        """Return ``model.state_dict()``."""
        if self._slots is None:
            return self.model.state_dict()
        return {name: tensors[key].detach() for name, (tensors, key) in self._slots.items()}

    def trainable(self, phase: Phase) -> dict[str, nn.Parameter]:
        """Return the parameters that learn in ``phase``, by name."""
        role = self.network.locality.role
        frozen = self.network.method.frozen if phase is Phase.FROZEN else frozenset()
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad and role[name] not in frozen}

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Load tensors as ``load_state_dict(tensors, strict=False)`` does, without its checks."""
        if self._slots is None:
            load_tensors(self.model, tensors)
        elif tensors:
            slots = map(self._slots.__getitem__, tensors)
            torch._foreach_copy_([own[key] for own, key in slots], list(tensors.values()))


class _Pristine:
    """Store what a model's modules hold: tensors, values, modes, attributes and hooks."""

    def __init__(self, model: nn.Module) -> None:
        every = [vars(module) for module in model.modules()]
        own = [(held, name, held[name]) for held in every for name in held.keys() - _TORCHS]
        self.knows_all = all(_plain(value) or isinstance(value, Tensor) for _, _, value in own)
        slots = [slot for held in every for name in _TORCHS if isinstance(slot := held.get(name), dict)]
        self._held = [(held, dict(held)) for held in (*every, *slots)]
        mutable = [one for one in own if isinstance(one[2], _CONTAINERS)] if self.knows_all else []
        self._mutable = [(held, name, copy.deepcopy(value)) for held, name, value in mutable]
        self._tensors = list({id(one): one for _, then in self._held for one in then.values() if isinstance(one, Tensor)}.values())
        self._values = [tensor.detach().clone() for tensor in self._tensors]
        self._learns = [tensor.requires_grad for tensor in self._tensors]

    @torch.no_grad()
    def restore(self) -> None:
        for held, then in self._held:
            if held and held.keys() != then.keys():
                held.clear()
            if then:
                held.update(then)
        for held, name, value in self._mutable:
            held[name] = copy.deepcopy(value)
        torch._foreach_copy_(self._tensors, self._values)
        for tensor, learns in zip(self._tensors, self._learns, strict=True):
            tensor.grad = None
            if tensor.requires_grad is not learns:
                tensor.requires_grad_(learns)


def _slots(model: nn.Module) -> dict[str, tuple[dict[str, Any], str]] | None:
    """Return each state_dict tensor's name -> (dict of its module, its key).

    The dicts stay valid if ``model.to`` replaces tensors. None: a module loads in
    its own way.
    """
    if not all(map(_has_no_way, model.modules())):
        return None
    slots: dict[str, tuple[dict[str, Any], str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for own in (module._parameters, module._buffers):
            slots |= {f"{path}.{key}" if path else key: (own, key) for key in own}
    state = model.state_dict(keep_vars=True)
    if not all(name in slots and slots[name][0][slots[name][1]] is tensor for name, tensor in state.items()):
        return None
    return {name: slots[name] for name in state}


def _has_no_way(module: nn.Module) -> bool:
    hooks = (module._load_state_dict_pre_hooks, module._load_state_dict_post_hooks, module._state_dict_hooks)
    return type(module)._load_from_state_dict in (nn.Module._load_from_state_dict, _NormBase._load_from_state_dict) and not any(hooks)


def _plain(value: Any) -> bool:
    """Tell whether ``value`` has plain Python values only, so that a copy is complete."""
    if isinstance(value, tuple | list | set | frozenset):
        return all(map(_plain, value))
    if isinstance(value, dict):
        return all(_plain(k) and _plain(v) for k, v in value.items())
    if isinstance(value, partial):
        return _plain(value.func) and _plain(value.args) and _plain(value.keywords)
    return isinstance(value, _PLAIN + _CODE)
