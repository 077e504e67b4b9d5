"""Convert a torch model: the layers of a method (FedBN, HBN, ...) replace the model's BatchNorm layers."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from types import MethodType
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from fl_bn.bn.composed import Unconvertible
from fl_bn.bn.copying import copied
from fl_bn.bn.kinds import is_plain, kind_of
from fl_bn.bn.layers import OwnBatchNorm, SharedNorm, followed, freeze_statistics
from fl_bn.bn.modes import MARK, remember_modes
from fl_bn.bn.roles import BUFFER_ROLES, Role, batch_norms, observes, roles, state_constants

if TYPE_CHECKING:  # methods name layers of this package
    from fl_bn.methods.method import Method

LOGGER = logging.getLogger("flwr")
STATES = ("frozen", "held", "observation", "refills")
"""The names of attributes by which fl-bn knows the state of a BatchNorm layer."""
TRAVEL = (torch.float16, torch.float32, torch.float64)
"""Dtypes of the floating-point tensors that a message may hold."""


def convert(model: nn.Module, method: Method) -> nn.Module:
    """Copy a model, find its BatchNorm layers by their type, and replace them by the layers of ``method``.

    If a tensor of the model could not be averaged or sent correctly, this function raises an error.

    >>> from fl_bn import convert, methods
    >>> convert(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8)), methods.hbn())[1].__class__.__name__
    'HybridBatchNorm'

    Args:
        model: any torch network. It is not changed.
        method: the result of a constructor in ``fl_bn.methods``, such as ``methods.hbn()``.

    Returns:
        The converted copy. Layers that ``method`` does not replace are copies of the model's.

    Raises:
        Unconvertible: replacing a layer would change what the network computes, or a tensor cannot be sent in
            a message. Or the network cannot be copied.
        UnknownTensor: a norm layer holds a tensor that is unknown to fl-bn, so it is unclear whether clients may send it.
        TypeError: ``model`` is no network, or ``method`` is no method.
    """
    check_kinds(model, method)
    check_complete(model)
    if hooked := hooked_parameters(model):
        LOGGER.warning(
            "torch copies parameters without hooks, so the copy that convert returns lacks the gradient hook of %s: register the "
            "hook on the copy",
            hooked[0],
        )
    model = copied(model)
    freeze_statistics(model, False)  # the model may be a copy that was made in a frozen round
    remember_modes(model)
    norms = [name for name, module in model.named_modules() if isinstance(module, _BatchNorm) or kind_of(module) is not None]
    ordinary = {name for index, name in enumerate(norms) if Role.STATISTIC in method.home(name, index)}
    replaced: dict[int, str] = {}
    for name, module in list(model.named_modules()):
        try:
            own = replace(method, layer=None) if name in ordinary else method
            _check(module, own)
            new = _replacement(module, own)
        except ValueError as reason:
            raise Unconvertible(f"{name or 'the model'} ({type(module).__name__}): {reason}") from reason
        if new is module:
            continue
        replaced[id(module)] = name
        module.__class__, module.__dict__ = type(new), vars(new)  # the same object, which the network may have in lists of its own, too
        if not name:
            break
    _check_methods(model, replaced)
    _check_fused(model, replaced)
    if method.prepare is not None:
        model = method.prepare(model)
    _check_state(model)
    state_constants(model)
    _check_tensors(model, method)
    return model


def check_converted(model: nn.Module, method: Method) -> None:
    """Check that the BatchNorm layers of a client's network are those of ``method``.

    Raises:
        ValueError: the network was not converted, or was converted for another method.
    """
    layers = batch_norms(model)
    if not layers:
        return
    example = None if method.layer is None else method.layer(nn.BatchNorm2d(next(iter(layers.values())).num_features))
    own = getattr(type(example), "way", type(example)) if isinstance(example, SharedNorm) else None
    replaced = [name for index, name in enumerate(layers) if own and Role.STATISTIC not in method.home(name, index)]
    right = {name for name in replaced if own and isinstance(layers[name], own)}
    wrong = [name for name, layer in layers.items() if isinstance(layer, SharedNorm) and name not in right] or ([] if right else replaced)
    if wrong:
        raise ValueError(
            f"this network is not converted for method {method.name}, but its layer {wrong[0] or 'itself'} is a "
            f"{type(layers[wrong[0]]).__name__}: give the client's network as convert(net, method)"
        )


def check_kinds(model: nn.Module, method: Method) -> None:
    """Check that ``model`` is a network, and ``method`` a method.

    Raises:
        TypeError: one of them is something else, such as the class ``Net`` in place of ``Net()``.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a network, an object such as Net(), but got {_in_words(model)}")
    if isinstance(method, type) or not hasattr(method, "needs_running"):
        raise TypeError(f"method must be what a function of fl_bn.methods returns, such as fbn(), but got {_in_words(method)}")


def _in_words(value: object) -> str:
    return f"{value.__name__} itself" if isinstance(value, type) or callable(value) and hasattr(value, "__name__") else f"{value!r:.100}"


def check_complete(model: nn.Module) -> None:
    """Check that ``model`` has no TorchScript modules, whose layers have lost their types, and no lazy modules without a shape.

    Raises:
        Unconvertible: a layer is a TorchScript module, or a lazy one without a shape.
    """
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise Unconvertible(
                f"{name or 'the model'} is a TorchScript module: its layers have lost their types, so its BatchNorm layers cannot be "
                "found. Give the network as it was before torch.jit.script or torch.jit.trace"
            )
        if any(map(nn.parameter.is_lazy, [*module.parameters(recurse=False), *module.buffers(recurse=False)])):
            # deepcopy would refuse it, too, but would not name the layer
            raise Unconvertible(
                f"{name or 'the model'} ({type(module).__name__}): a lazy layer has no shape yet: run one batch through the model first"
            )


def hooked_parameters(model: nn.Module) -> list[str]:
    """Return the names of the parameters that have gradient hooks."""
    kinds = ("_backward_hooks", "_post_accumulate_grad_hooks")
    return [name for name, parameter in model.named_parameters() if any(getattr(parameter, kind, None) for kind in kinds)]


def _check_methods(model: nn.Module, replaced: Mapping[int, str]) -> None:
    """Check that the network stores no bound method of a replaced layer. Such a method would still be that of the layer's old class.

    Raises:
        Unconvertible: the network stores one.
    """
    for owner in model.modules():
        for attribute, value in vars(owner).items():
            for one in value if isinstance(value, list | tuple) else [value]:
                if isinstance(one, MethodType) and id(one.__self__) in replaced and one.__self__ is not owner:
                    raise Unconvertible(
                        f"attribute {attribute!r} of {type(owner).__name__} stores the method {one.__name__} of layer "
                        f"{replaced[id(one.__self__)]!r}, but the conversion replaces this layer: store the layer itself, and call it"
                    )


def _check_fused(model: nn.Module, replaced: Mapping[int, str]) -> None:
    """Check that torch's fused modules for quantisation still have their BatchNorm layer, whose statistics they read.

    Raises:
        Unconvertible: the layer was replaced by one that is no BatchNorm, such as GroupNorm.
    """
    for name, module in model.named_modules():
        for child in module.children():
            if type(module).__module__.startswith("torch.ao.") and id(child) in replaced and not isinstance(child, _BatchNorm):
                raise Unconvertible(
                    f"{name} ({type(module).__name__}) is fused for quantisation and reads the statistics of its BatchNorm layer, which "
                    f"would be a {type(child).__name__}: convert the network before it is fused, or choose a method with BatchNorm"
                )


def _check_state(model: nn.Module) -> None:
    """Check that the state_dict, which a network may override, has all parameters to train and BatchNorm's running statistics.

    Raises:
        Unconvertible: one of them is missing, or a tensor is sparse.
    """
    state = model.state_dict()
    if sparse := [name for name, tensor in state.items() if isinstance(tensor, torch.Tensor) and tensor.layout is not torch.strided]:
        raise Unconvertible(
            f"{sparse[0]} is sparse, and messages hold dense tensors only: register a buffer with persistent=False, or keep it dense and "
            "call to_sparse() in forward"
        )
    names = set(state)
    trained = [name for name, p in model.named_parameters(remove_duplicate=False) if p.requires_grad]
    norms = [(f"{name}." if name else "", layer) for name, layer in batch_norms(model).items()]
    running = [f"{prefix}{key}" for prefix, layer in norms for key in ("running_mean", "running_var") if getattr(layer, key) is not None]
    for what, needed in (("a parameter to train", trained), ("a running statistic of BatchNorm", running)):
        if missing := [name for name in needed if name not in names]:
            raise Unconvertible(
                f"the state_dict of {type(model).__name__} must have every tensor that changes in training, but leaves out {missing[0]}, "
                f"{what}: let state_dict() return it, and leave it out of your files where you save them. If a wrapper renames it "
                "(checkpoint_wrapper), call torch.utils.checkpoint.checkpoint in forward in its place"
            )


def _check_tensors(model: nn.Module, method: Method) -> None:
    """Check the dtype and the shape of every tensor that the method sends, or keeps at the client between rounds.

    Raises:
        Unconvertible: a tensor's dtype cannot be averaged or stored in a message, or its shape is not known yet. The
            message has the tensor's name and says what to do.
    """
    state = model.state_dict()
    for name, role in roles(model).items():
        if role is Role.COUNTER and not method.keeps(role):
            continue
        buffer = role in BUFFER_ROLES.values()
        if state[name].is_complex() and method.shares(role):
            way = "or state its role, constant or kept, by set_buffer_roles" if buffer else "and call torch.view_as_complex in forward"
            raise Unconvertible(f"{name} is {state[name].dtype}, but only real numbers are averaged: store torch.view_as_real(...), {way}")
        if state[name].is_floating_point() and state[name].dtype not in TRAVEL:
            raise Unconvertible(
                f"{name} is {state[name].dtype}, a dtype that NumPy lacks, so messages cannot hold it: keep the network in float32 "
                "(net.float()) and train it under torch.autocast (in the run config: precision='mixed'). For messages of half the size, "
                "set payload-dtype"
            )
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and not (parameter.requires_grad or parameter.is_meta or bool(parameter.isfinite().all())):
            raise Unconvertible(
                f"{name} is a parameter that does not learn and holds infinite numbers or NaN, which clients may not send: make it a "
                "buffer (register_buffer), which is then a constant"
            )
    for name, module in model.named_modules():
        extremes = getattr(module, "min_val", None)
        if observes(module) and isinstance(extremes, torch.Tensor) and not extremes.numel():
            raise Unconvertible(
                f"{name or 'the model'} ({type(module).__name__}): its minimum and maximum have no shape yet: run one batch through the "
                "model first"
            )


def _check(module: nn.Module, method: Method) -> None:
    if isinstance(module, _InstanceNorm) and module.track_running_stats:
        raise ValueError("no method combines running statistics of InstanceNorm layers: build the layer with track_running_stats=False")
    if isinstance(module, OwnBatchNorm):
        raise ValueError("the model was converted before: convert the original one")
    if isinstance(module, _BatchNorm) and (taken := [name for name in STATES if hasattr(module, name)]):
        raise ValueError(f"it has an attribute {taken[0]!r}, a name that fl-bn uses in such a layer: rename the attribute")
    if isinstance(module, _BatchNorm) and hasattr(module, "parametrizations"):
        raise ValueError(
            "it is parametrized, so a method cannot find its scale and shift: remove the parametrization (torch.nn.utils.parametrize) "
            "before converting"
        )
    if isinstance(module, _BatchNorm) and method.layer is None and method.needs_running and module.running_mean is None:
        raise ValueError(
            f"it has no running statistics (track_running_stats=False), but {method.name} freezes them or keeps them at the client: "
            "build it with track_running_stats=True, or choose fedavg or fedbn"
        )


def _replacement(module: nn.Module, method: Method) -> nn.Module:
    """Make the layer that replaces ``module``.

    Returns:
        The new layer, or ``module`` itself if it stays.
    """
    kind = kind_of(module)
    layer = module
    if kind is not None and kind.convert is not None:
        layer = kind.convert(module)
        followed(layer, layer, kind.then)
    if method.layer is None or not isinstance(layer, _BatchNorm):
        return layer
    if kind is None and not is_plain(layer):
        raise ValueError(
            "it overrides BatchNorm's forward, so replacing it would lose what it adds (an activation, say): use a plain BatchNorm layer, "
            "or name the submodules that it calls on the normalised batch, such as 'act': "
            f"fl_bn.register_batch_norm({type(module).__name__}, then=['act'])"
        )
    known = {"weight", "bias", "running_mean", "running_var", "num_batches_tracked"}
    own = [*layer.named_parameters(recurse=False), *layer.named_buffers(recurse=False)]
    if extra := [name for name, _ in own if name not in known]:
        raise ValueError(
            f"beside BatchNorm's own tensors it holds {', '.join(map(repr, extra))}, which replacing the layer would lose: move them to a "
            "module of their own"
        )
    new = method.layer(layer)
    for key in ("weight", "bias"):  # keep the layer's own parameter, not a copy, because another layer may share it
        mine, theirs = getattr(new, key, None), getattr(layer, key)
        if isinstance(mine, nn.Parameter) and mine.shape == theirs.shape and (mine.is_meta or torch.equal(mine, theirs)):
            setattr(new, key, theirs)
    new = followed(new, layer, () if kind is None else kind.then)
    if getattr(module, MARK, False):
        setattr(new, MARK, True)
    return new
