"""Replace a torch model's BatchNorm layers by the layers of a method (FedBN, HBN, ...)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from fl_bn.bn.kinds import Composed, Unconvertible, is_plain, kind_of
from fl_bn.bn.layers import OwnBatchNorm, SharedNorm, followed, freeze_statistics
from fl_bn.bn.modules import MARK, copied, remember_modes
from fl_bn.bn.roles import BUFFER_ROLES, Role, batch_norms, roles, state_constants

if TYPE_CHECKING:  # methods name layers of this package
    from fl_bn.methods.method import Method

TRAVEL = (torch.float16, torch.float32, torch.float64)
"""Floating-point dtypes that a message may hold."""
ATTRIBUTES = ("frozen", "held_with_affine", "observation", "refills", "mixing_logit", "then")
"""Attributes that fl-bn uses in a BatchNorm layer."""
RUNNING = ("running_mean", "running_var")
TENSORS = ("weight", "bias", *RUNNING, "num_batches_tracked")
"""Tensors of torch's BatchNorm."""


def _refuse(reasons: Iterable[str], where: str = "") -> None:
    for reason in reasons:
        raise Unconvertible(f"{where}{reason}")


def _named(name: str, layer: nn.Module) -> str:
    return f"{name or 'the model'} ({type(layer).__name__}): "


def _wrong_layer(layer: nn.Module, method: Method) -> Iterator[str]:
    """Yield what is wrong with a layer of the network, under ``method``."""
    if type(layer).__module__.startswith("torch.ao.") and hasattr(layer, "calculate_qparams"):
        yield "the ranges of torch.ao's observers cannot be averaged: train before prepare_qat, and quantise afterwards"
    if isinstance(layer, _InstanceNorm) and layer.track_running_stats:
        yield "no method combines running statistics of InstanceNorm layers: build the layer with track_running_stats=False"
    if isinstance(layer, OwnBatchNorm):
        yield "the model was converted before: convert the original one"
    if not isinstance(layer, _BatchNorm):
        return
    if not isinstance(layer, Composed) and (taken := [name for name in ATTRIBUTES if hasattr(layer, name)]):
        yield f"it has an attribute {taken[0]!r}, a name that fl-bn uses in such a layer: rename the attribute"
    if hasattr(layer, "parametrizations"):
        yield "it is parametrized, so a method cannot find its scale and shift: remove the parametrization before converting"
    if method.layer is None:
        if method.needs_running and layer.running_mean is None:
            what = f"it has no running statistics (track_running_stats=False), but {method.name} uses them"
            yield f"{what}: build it with track_running_stats=True, or choose fedavg, fedbn or gn"
        return
    if kind_of(layer) is None and not is_plain(layer):
        yield (
            "it overrides BatchNorm's forward, so replacing it would lose what it adds: use a plain BatchNorm layer, or name the "
            f"submodules that it calls on its output: fl_bn.register_batch_norm({type(layer).__name__}, then=['act'])"
        )
    own = [name for name, _ in (*layer.named_parameters(recurse=False), *layer.named_buffers(recurse=False))]
    if extra := [name for name in own if name not in TENSORS]:
        yield f"beside BatchNorm's own tensors it holds {extra[0]!r}, which replacing it would lose: move it to a module of its own"


def _wrong_tensors(model: nn.Module, method: Method) -> Iterator[str]:
    """Yield what is wrong with the tensors of the converted ``model``."""
    state, layers = model.state_dict(), batch_norms(model)
    for name, tensor in state.items():
        if isinstance(tensor, torch.Tensor) and tensor.layout is not torch.strided:
            yield f"{name} is sparse, and messages hold dense tensors only: set persistent=False, or call to_sparse() in forward"
    trained = [name for name, p in model.named_parameters(remove_duplicate=False) if p.requires_grad]
    running = [(name, key) for name, layer in layers.items() for key in RUNNING if getattr(layer, key) is not None]
    for name in [*trained, *(f"{name}.{key}" if name else key for name, key in running)]:
        if name not in state:
            yield (
                f"the state_dict of {type(model).__name__} lacks {name}: let it return all parameters to train and all running statistics "
                "(checkpoint_wrapper renames them: call torch.utils.checkpoint.checkpoint in forward)"
            )
    for name, role in roles(model).items():
        if role is Role.COUNTER and not method.keeps(role):
            continue
        if role is Role.BUFFER and not state[name].is_meta and not bool(state[name].isfinite().all()):
            yield f"{name} holds infinite numbers or NaN, so it cannot be averaged: state its role, constant or kept, by set_buffer_roles"
        if state[name].is_complex() and method.shares(role):
            way = "or state its role by set_buffer_roles" if role in BUFFER_ROLES.values() else "and call torch.view_as_complex in forward"
            yield f"{name} is {state[name].dtype}, but only real numbers are averaged: store torch.view_as_real(...), {way}"
        if state[name].is_floating_point() and state[name].dtype not in TRAVEL:
            yield f"{name} is {state[name].dtype}, which NumPy lacks: keep the network in float32, and train it under torch.autocast"
    for name, p in model.named_parameters():
        if p.is_floating_point() and not (p.requires_grad or p.is_meta or bool(p.isfinite().all())):
            yield f"{name} does not learn and holds infinite numbers or NaN, which clients may not send: register it as a buffer"


def convert(model: nn.Module, method: Method) -> nn.Module:
    """Copy a model, and replace its BatchNorm layers by those of ``method``.

    >>> from fl_bn import convert, methods
    >>> convert(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8)), methods.hbn())[1].__class__.__name__
    'HybridBatchNorm'

    Args:
        model: a torch network. It is not changed.
        method: for example ``methods.hbn()``.

    Raises:
        Unconvertible: the network would compute something else, or a tensor cannot
            be sent.
        UnknownTensor: fl-bn does not know a tensor of a norm layer.
        TypeError: ``model`` is no network, or ``method`` is no method.
        ValueError: ``method`` keeps a layer at home that the network lacks, or single
            layers, and replaces the others.
    """
    check_kinds(model, method)
    check_complete(model)
    model = copied(model)
    freeze_statistics(model, False)  # the model may be a copy that was made in a frozen round
    remember_modes(model)
    norms = [name for name, module in model.named_modules() if isinstance(module, _BatchNorm) or kind_of(module) is not None]
    ordinary = {name for name, roles in method.home(norms).items() if Role.STATISTIC in roles}
    for name, module in list(model.named_modules()):
        own = replace(method, layer=None) if name in ordinary else method
        _refuse(_wrong_layer(module, own), _named(name, module))
        try:
            new = _replacement(module, own)
        except ValueError as reason:
            raise Unconvertible(f"{_named(name, module)}{reason}") from reason
        if new is module:
            continue
        module.__class__, module.__dict__ = type(new), vars(new)  # the same object, which the network may have in lists of its own, too
        if not name:
            break
    if method.prepare is not None:
        model = method.prepare(model)
    # the table of places asks by these names again
    if method.home(norms) and norms != [*batch_norms(model)]:
        raise ValueError(f"{method.name} replaces BatchNorm: no single layer can stay at home")
    state_constants(model)
    _refuse(_wrong_tensors(model, method))
    return model


def check_converted(model: nn.Module, method: Method) -> None:
    """Raise ValueError unless a client's network has the layers of ``method``."""
    layers = batch_norms(model)
    if not layers:
        return
    example = None if method.layer is None else method.layer(nn.BatchNorm2d(next(iter(layers.values())).num_features))
    own = getattr(type(example), "way", type(example)) if isinstance(example, SharedNorm) else None
    home = method.home(layers)
    replaced = [name for name in layers if own and Role.STATISTIC not in home.get(name, ())]
    right = {name for name in replaced if own and isinstance(layers[name], own)}
    wrong = [name for name, layer in layers.items() if isinstance(layer, SharedNorm) and name not in right] or ([] if right else replaced)
    if wrong:
        raise ValueError(
            f"this network is not converted for method {method.name}, but its layer {wrong[0] or 'itself'} is a "
            f"{type(layers[wrong[0]]).__name__}: give the client's network as convert(net, method)"
        )


def check_kinds(model: nn.Module, method: Method) -> None:
    """Raise TypeError unless ``model`` is a network (no class) and ``method`` a method."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a network, an object such as Net(), but got {model!r:.100}")
    if isinstance(method, type) or not hasattr(method, "needs_running"):
        raise TypeError(f"method must be what a function of fl_bn.methods returns, such as fbn(), but got {method!r:.100}")


def check_complete(model: nn.Module) -> None:
    """Raise Unconvertible for TorchScript modules (types are lost) and lazy ones without a shape."""
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            _refuse(["a TorchScript module has lost its layers' types: give the network before torch.jit.script"], _named(name, module))
        if any(map(nn.parameter.is_lazy, [*module.parameters(recurse=False), *module.buffers(recurse=False)])):
            _refuse(["a lazy layer has no shape yet: run one batch through the model first"], _named(name, module))


def _replacement(module: nn.Module, method: Method) -> nn.Module:
    """Return the layer that replaces ``module``, or ``module`` itself."""
    kind = kind_of(module)
    layer = module
    if kind is not None and kind.convert is not None:
        layer = kind.convert(module)
        followed(layer, layer, kind.then)
    if method.layer is None or not isinstance(layer, _BatchNorm):
        return layer
    new = method.layer(layer)
    for key in ("weight", "bias"):  # keep the layer's own parameter, not a copy, because another layer may share it
        mine, theirs = getattr(new, key, None), getattr(layer, key)
        if isinstance(mine, nn.Parameter) and mine.shape == theirs.shape and (mine.is_meta or torch.equal(mine, theirs)):
            setattr(new, key, theirs)
    new = followed(new, layer, () if kind is None else kind.then)
    if getattr(module, MARK, False):
        setattr(new, MARK, True)
    return new
