"""Find each tensor's role in a model, such as weight, statistic or counter.

The module's type decides. A test by name ("bn" in key) misses torchvision's
``downsample.1``, and silently turns FedBN into FedAvg.

Other modules' floating-point buffers are shared, unless ``set_buffer_roles`` says
otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum
from fnmatch import fnmatchcase
from itertools import chain

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.utils import parametrizations
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm

from fl_bn.support.names import expected, names_of, nearest


class Role(Enum):
    """Name a tensor's role: whether it leaves the client, and how the server combines it.

    Attributes:
        WEIGHT: learnable, outside norm layers.
        AFFINE: scale and shift of a BatchNorm layer.
        OTHER_AFFINE: scale and shift of LayerNorm, GroupNorm and the like, shared
            as weights.
        STATISTIC: running mean and variance.
        MIXING: HBN's mixing logits, one learnable number per channel.
        COUNTER: an integer such as num_batches_tracked, never averaged.
        BATCHES: num_batches_tracked of a cumulative average (momentum=None). The
            server adds the median of the clients' local steps, and sends the sum.
            Clients never send it.
        BUFFER: floating point, not learnable, outside norm layers: averaged.
        KEPT: a buffer that the client stores and never sends.
        RECOMPUTED: a buffer that the server computes from the weights. Clients
            never send it.
        CONSTANT: a buffer that training does not change. Only the server sends it.
    """

    WEIGHT = "weight"
    AFFINE = "affine"
    OTHER_AFFINE = "affine of other norms"
    STATISTIC = "statistic"
    MIXING = "mixing"
    COUNTER = "counter"
    BATCHES = "count of batches"
    BUFFER = "buffer"
    KEPT = "kept"
    RECOMPUTED = "recomputed"
    CONSTANT = "constant"


DOWN_ONLY = frozenset({Role.RECOMPUTED, Role.CONSTANT, Role.BATCHES})
"""Roles of tensors that clients receive but never send."""
OF_BATCH_NORM = frozenset({Role.AFFINE, Role.STATISTIC, Role.COUNTER, Role.BATCHES})
"""Roles of the tensors of torch's BatchNorm."""
BUFFER_ROLES = {"shared": Role.BUFFER, "kept": Role.KEPT, "recomputed": Role.RECOMPUTED, "constant": Role.CONSTANT}
"""Roles that a user may state for a buffer."""


class UnknownTensor(ValueError):
    """Signal a norm layer's tensor of unknown role: may clients send it?"""


NORM_LAYERS = (_NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)

_NORM_TENSORS = {
    "weight": Role.AFFINE,
    "bias": Role.AFFINE,
    "running_mean": Role.STATISTIC,
    "running_var": Role.STATISTIC,
    "mixing_logit": Role.MIXING,
    "num_batches_tracked": Role.COUNTER,
}


def roles(model: nn.Module) -> dict[str, Role]:
    """Return the role of every tensor in ``model.state_dict()``, in its order.

    Raises:
        UnknownTensor: neither torch nor this project defines a norm layer's tensor.
        ValueError: an entry of the state_dict is no tensor.
    """
    role: dict[str, Role] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        prefix = f"{name}." if name else ""
        parameters = dict(module.named_parameters(recurse=False, remove_duplicate=False))
        buffers = dict(module.named_buffers(recurse=False, remove_duplicate=False))
        for key, tensor in {**parameters, **buffers}.items():
            role[prefix + key] = _role(module, prefix + key, key, tensor, key in parameters)
    names = list(model.state_dict())
    if missing := [name for name in names if name not in role]:
        raise ValueError(
            f"every entry of the state_dict must be a parameter or a buffer, but {missing} are neither: register them as buffers, or "
            "leave them out of the state_dict"
        )
    return {name: role[name] for name in names}


def _role(module: nn.Module, name: str, key: str, tensor: Tensor, learnable: bool) -> Role:
    stated: Role | None = vars(module).get(STATED, {}).get(key)
    if isinstance(module, NORM_LAYERS):
        if key in _NORM_TENSORS:
            role = _NORM_TENSORS[key]
            if role is Role.COUNTER and isinstance(module, _BatchNorm) and module.momentum is None:
                return Role.BATCHES
            return Role.OTHER_AFFINE if role is Role.AFFINE and not isinstance(module, _BatchNorm) else role
        if stated is None:
            advice = "state the role of a buffer by set_buffer_roles, or keep the tensor outside the norm layer"
            if key.startswith(_DERIVED):
                advice = "it comes from torch's spectral_norm, weight_norm or prune: remove that from this layer"
            raise UnknownTensor(
                f"{name}: {type(module).__name__} holds a tensor {key!r}, which fl-bn does not know in a norm layer (it knows "
                f"{', '.join(_NORM_TENSORS)}). So it is unclear whether clients may send it: {advice}."
            )
        return stated
    if stated is not None:
        return stated
    if learnable:
        return Role.WEIGHT if tensor.is_floating_point() or tensor.is_complex() else Role.COUNTER
    return _known(module, key) or (Role.BUFFER if torch.is_floating_point(tensor) or torch.is_complex(tensor) else Role.COUNTER)


STATED = "_fl_bn_buffer_roles"  # the attribute of a module in which the roles of its own buffers are stated
_DERIVED = ("weight_", "bias_orig", "bias_mask")


def _known(module: nn.Module, key: str) -> Role | None:
    """Return the role of buffer ``key`` if ``module`` is of a known kind, else None."""
    if isinstance(module, parametrizations._SpectralNorm) and key in ("_u", "_v"):
        return Role.RECOMPUTED
    if isinstance(module, parametrizations._Orthogonal) and key == "base":
        return Role.CONSTANT  # the parameter is a coordinate relative to the base, so all clients need the server's base
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, SpectralNorm) and key in (f"{hook.name}_u", f"{hook.name}_v"):
            return Role.RECOMPUTED
        if isinstance(hook, BasePruningMethod) and key == f"{hook._tensor_name}_mask":
            return Role.CONSTANT
    return None


def set_buffer_roles(model: nn.Module, stated: Mapping[str, str]) -> nn.Module:
    """State roles of ``model``'s buffers. Return ``model``.

    Copies of ``model`` have them, too.

    >>> from fl_bn import set_buffer_roles
    >>> net = nn.Sequential(nn.Linear(2, 2))
    >>> net[0].register_buffer("site_mean", torch.zeros(2))
    >>> set_buffer_roles(net, {"*.site_mean": "kept"}) is net  # each site has its own; meanings: docs/how-to/network.md
    True

    Args:
        model: changed in place.
        stated: buffer name or shell pattern -> ``shared`` (averaged), ``kept``,
            ``recomputed`` or ``constant``. The last match counts.

    Raises:
        ValueError: a role is unknown, a pattern has no match, or a buffer cannot
            have the role.
    """
    buffers = {name: (module, key, tensor) for name, module, key, tensor in _free_buffers(model)}
    for pattern, role_name in stated.items():
        role, names = _named(pattern, role_name), [name for name in buffers if fnmatchcase(name, pattern)]
        wrong = [] if names else [f"no buffer has this name: the model has {', '.join(buffers) or 'none'}{nearest(pattern, buffers)}"]
        for name in names:
            module, key, tensor = buffers[name]
            if role is Role.BUFFER and not tensor.is_floating_point():
                wrong.append(f"{name} is {tensor.dtype}, and only floating-point buffers are averaged: state 'kept' or 'constant'")
            if role is Role.RECOMPUTED and _known(module, key) is not role and not callable(getattr(module, RECOMPUTE, None)):
                wrong.append(f"{name} needs a method {RECOMPUTE}() of {type(module).__name__}, which sets it from the module's parameters")
        if wrong:
            raise ValueError(f"buffer {pattern!r} cannot be {role_name}: {wrong[0]}")
        for name in names:
            module, key, _ = buffers[name]
            state_role(module, key, role)
    return model


RECOMPUTE = "recompute_buffers"  # the method of a user's module that computes its buffers from its parameters


def state_role(module: nn.Module, key: str, role: Role) -> None:
    """Store the role of buffer ``key`` of ``module`` for ``roles``."""
    setattr(module, STATED, {**vars(module).get(STATED, {}), key: role})


def parse_buffer_roles(text: str) -> dict[str, str]:
    """Parse ``set_buffer_roles``'s argument ``stated`` from a run config's text.

    It is empty or has the form ``"*.codebook=shared, site.*=kept"``.

    Raises:
        ValueError: the text has another form, or a role is unknown.
    """
    stated = {}
    for part in names_of(text):
        name, _, role = (piece.strip() for piece in part.partition("="))
        _named(name, role)
        stated[name] = role
    return stated


def _named(buffer: str, role: str) -> Role:
    if not buffer or role not in BUFFER_ROLES:
        raise ValueError(f"buffer {buffer!r}: {expected('a role (NAME=ROLE)', role, BUFFER_ROLES)}")
    return BUFFER_ROLES[role]


def _free_buffers(model: nn.Module) -> Iterable[tuple[str, nn.Module, str, Tensor]]:
    """Yield name, module, key and tensor of the buffers whose role may be stated."""
    for path, module in model.named_modules(remove_duplicate=False):
        for key, tensor in module.named_buffers(recurse=False, remove_duplicate=False):
            if key not in module._non_persistent_buffers_set and not (isinstance(module, NORM_LAYERS) and key in _NORM_TENSORS):
                yield f"{path}.{key}" if path else key, module, key, tensor


def state_constants(model: nn.Module) -> None:
    """Give the role CONSTANT to buffers that hold infinity or NaN (a mask of -inf).

    Only a stated role comes before it. Such numbers must not be averaged.
    """
    for _, module, key, tensor in _free_buffers(model):
        known = key in vars(module).get(STATED, {}) or _known(module, key) is not None
        numbers = tensor.is_floating_point() and not tensor.is_meta and tensor.layout is torch.strided
        if not known and numbers and not bool(tensor.isfinite().all()):
            state_role(module, key, Role.CONSTANT)


def buffers_in_words(model: nn.Module) -> str:
    """Describe for the log what happens to ``model``'s buffers; empty if it has none."""
    words = {
        Role.BUFFER: "averaged",
        Role.KEPT: "kept by each client",
        Role.RECOMPUTED: "recomputed from the weights",
        Role.CONSTANT: "constant",
        Role.COUNTER: "never sent",
    }
    free, role = {name for name, *_ in _free_buffers(model)}, roles(model)
    names = {verb: [name for name in role if role[name] is one and name in free] for one, verb in words.items()}
    parts = [f"{verb} {_some(some)}" for verb, some in names.items() if some]
    return f"buffers: {'; '.join(parts)}" if parts else ""


def _some(names: list[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def inputs_like(model: nn.Module) -> Tensor:
    """Return any tensor of the device and dtype that ``model`` expects as input.

    Without a floating-point tensor, the dtype is torch's default.
    """
    first = None
    for tensor in chain(model.parameters(), model.buffers()):
        if tensor.is_floating_point():
            return tensor
        first = tensor if first is None else first
    return torch.empty(0, device=None if first is None else first.device)


def unknown_norms(model: nn.Module) -> dict[str, nn.Module]:
    """Return, by name, layers of unknown type that own running statistics.

    Constants (torchvision's ``FrozenBatchNorm2d``) are left out.
    """
    return {name: module for name, module in model.named_modules() if not isinstance(module, NORM_LAYERS) and _tracks_statistics(module)}


def _tracks_statistics(module: nn.Module) -> bool:
    learns = any(True for _ in module.parameters(recurse=False)) or "frozen" not in type(module).__name__.lower()
    return learns and {"running_mean", "running_var"} <= {name for name, _ in module.named_buffers(recurse=False)}


def batch_norms(model: nn.Module) -> dict[str, _BatchNorm]:
    """Return every BatchNorm layer of ``model``, torch's or fl-bn's, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, _BatchNorm)}
