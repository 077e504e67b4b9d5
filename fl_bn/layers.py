"""BatchNorm layers, one small class for each way of normalising a training batch. In evaluation all are plain BatchNorm.

A layer of this project is a subclass of the torch layer that it replaces. So a user's ``isinstance(layer,
nn.BatchNorm2d)`` is true, and its tensors have torch's names. Two attributes of a layer state whether its statistics
are frozen, and which ``Observation`` records its inputs. Neither is a mode or a hook, so a training loop does not
change them by ``train()`` or by removing hooks.

The layers take inputs of 0 to 3 spatial dimensions, as the replaced layer does, with channels at dimension 1.
This file also makes group and instance normalisation, which the baselines use in place of BatchNorm.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any, ClassVar, Self, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from fl_bn.hybrid import inside_transform, mixture, normalise, plain
from fl_bn.modes import held_layers
from fl_bn.moments import Moments, Running, channel_moments, ema, pool
from fl_bn.roles import batch_norms

M = TypeVar("M", bound=nn.Module)
F_ = TypeVar("F_", bound=Callable[..., Any])


class Unconvertible(ValueError):
    """Signal that replacing a layer would change what the network computes. The message says why and what to do."""


class Composed(nn.Module):
    """Abstract base of the layer classes that ``composed`` makes at run time.

    Each of these classes has two base classes. For example, HBN replaces an ``nn.BatchNorm2d`` by a layer whose class is
    derived from ``HybridBatchNorm`` and ``nn.BatchNorm2d``.

    Attributes:
        way: the first base class, which decides how the layer computes (``HybridBatchNorm``).
        kind: the second base class, which is the class of the replaced layer (``nn.BatchNorm2d``).
    """

    way: ClassVar[type[Composed]]
    kind: ClassVar[type[nn.Module]]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the layer with the base classes of its class, because pickle cannot import a class that was made at run time."""
        if "kind" not in vars(type(self)):
            return super().__reduce_ex__(protocol)
        return _rebuilt, (_parts(type(self)),), self.__dict__


_COMPOSED: dict[tuple[type[Any], type[Any]], type[Any]] = {}


def composed(way: type[Any], kind: type[Any]) -> type[Any]:
    """Return a layer class with the two base classes ``way`` and ``kind``. Equal arguments give the same class.

    Args:
        way: the first base class, which decides how the layer computes.
        kind: the second base class: the class of the layer that is replaced.
    """
    if (way, kind) not in _COMPOSED:
        body = {"__module__": way.__module__, "way": way, "kind": kind}
        _COMPOSED[way, kind] = type(way.__name__, (way, kind), body)
    return _COMPOSED[way, kind]


def _parts(kind: type[Any]) -> tuple[type[Any], ...]:
    """Return the classes from which ``composed`` made ``kind``: the last applied ``way`` first, the original layer's class last."""
    return (kind.way, *_parts(kind.kind)) if "kind" in vars(kind) else (kind,)


def _rebuilt(parts: tuple[type[Any], ...]) -> Any:
    *ways, made = parts
    for way in reversed(ways):
        made = composed(way, made)
    return object.__new__(made)


class OwnBatchNorm(Composed, _BatchNorm):
    """Abstract base of this project's BatchNorm layers, whose statistics can be frozen and whose inputs can be recorded.

    Attributes:
        frozen: whether the layer normalises with its running statistics and does not update them.
            ``model.train()``, ``layer.train()`` and ``layer.training = True`` do not change that.
        observation: records the moments of the layer's inputs. None: they are not recorded. A copy of the layer has None.
        refills: whether ``reset_running_stats`` was called (by ``torch.optim.swa_utils.update_bn``, say). In training mode
            the layer is then torch's BatchNorm, so that its statistics become those of the data. A round ends this.
    """

    frozen = refills = False
    observation: Observation | None = None

    @property
    def training(self) -> bool:
        """Return whether the layer normalises as in training. A frozen layer never does."""
        return bool(self.__dict__["training"]) and (self.refills or not self.frozen)

    @training.setter
    def training(self, mode: bool) -> None:
        self.__dict__["training"] = mode

    def reset_running_stats(self) -> None:
        """Set the statistics to mean 0 and variance 1. In training mode the layer then measures them as torch's BatchNorm does."""
        super().reset_running_stats()
        self.refills = True

    def reset_parameters(self) -> None:
        """Set statistics and affine parameters to their first values. The layer computes as before."""
        super().reset_parameters()
        vars(self).pop("refills", None)

    @classmethod
    def from_batch_norm(cls, layer: _BatchNorm) -> Self:
        """Make a layer of this class with the tensors, mode, hooks and attributes of ``layer``.

        Raises:
            Unconvertible: ``layer`` has no running statistics.
        """
        if layer.running_mean is None or layer.running_var is None:
            raise Unconvertible(
                f"it has no running statistics (track_running_stats=False), but {cls.__name__} normalises with them: build the layer "
                "with track_running_stats=True, or choose fedavg, fedbn or gn"
            )
        new: Self = copy.deepcopy(layer)  # type: ignore[assignment]
        new.__class__ = composed(cls, type(layer))
        return new

    @property
    def held(self) -> bool:
        """Return whether the layer's statistics are frozen because its affine parameters are. False here, as in torch's BatchNorm."""
        return False

    def __prepare_scriptable__(self) -> Self:
        """Raise an error, because ``torch.jit.script`` cannot compile this layer. ``torch.jit.script`` calls this method.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            f"torch.jit.script cannot compile {type(self).__name__}, which depends on Python attributes that training changes: train "
            "without torch.jit.script. Afterwards load the tensors into your own network, net.load_state_dict(model.state_dict(), "
            "strict=False), and script that network"
        )


class FrozenBatchNorm(OwnBatchNorm):
    """Normalise with the running statistics, even in training mode.

    ``freeze_statistics`` gives this class to torch's BatchNorm layers and to those of a user's own class.
    """

    frozen = True


class _SharedNorm(OwnBatchNorm):
    """Abstract base of the layers that normalise training batches in another way than torch. A subclass defines ``normalised``.

    Attributes:
        then: names of submodules that the layer calls on its output, in this order, such as an activation.
        spatial: numbers of spatial dimensions that an input may have. Empty: any number.
    """

    then: tuple[str, ...] = ()
    spatial: tuple[int, ...] = ()
    momentum: float
    running_mean: Tensor
    running_var: Tensor

    @classmethod
    def from_batch_norm(cls, layer: _BatchNorm) -> Self:
        """Make a layer of this class with the tensors, mode, hooks and attributes of ``layer``.

        Raises:
            Unconvertible: ``layer`` has no running statistics, or averages them cumulatively
                (``momentum=None``).
        """
        if layer.running_mean is not None and layer.momentum is None:
            raise Unconvertible("momentum=None (cumulative average) has no federated counterpart: give a number, e.g. 0.1")
        new = super().from_batch_norm(layer)
        known = {nn.BatchNorm1d: (0, 1), nn.BatchNorm2d: (2,), nn.BatchNorm3d: (3,)}
        new.spatial = next((dims for kind, dims in known.items() if isinstance(layer, kind)), ())
        return new

    @property
    def can_be_held(self) -> bool:
        """Return whether the layer has no affine parameter, so that only its surroundings tell whether it is frozen."""
        return self.weight is None and self.bias is None

    @property
    def held(self) -> bool:
        """Return whether no affine parameter requires a gradient. The running statistics then count as frozen, too."""
        own = [p for p in (self.weight, self.bias) if p is not None]
        return bool(own) and not any(p.requires_grad for p in own)

    def forward(self, input: Tensor) -> Tensor:
        """Normalise ``input`` (B, C, *), then call the submodules of ``then`` on the result."""
        y = _BatchNorm.forward(self, input) if self.refills else self.normalised(input)
        for name in self.then:
            y = getattr(self, name)(y)
        return y

    def normalised(self, x: Tensor) -> Tensor:
        """Normalise ``x`` (B, C, *) with the statistics that the subclass prescribes, then scale and shift it."""
        raise NotImplementedError

    def check_input(self, x: Tensor) -> None:
        """Check that ``x`` has shape (B, C, *), with this layer's number C of channels and number of dimensions.

        Raises:
            ValueError: ``x`` has another shape.
        """
        if x.dim() < 2 or x.shape[1] != self.num_features or (self.spatial and x.dim() - 2 not in self.spatial):
            wanted = " or ".join(f"(B, {self.num_features}{', *' * d})" for d in self.spatial or (0, 1, 2, 3))
            raise ValueError(f"{type(self).__name__} expects an input {wanted}, but got {tuple(x.shape)}")

    def normalise_shared(self, x: Tensor) -> Tensor:
        """Normalise ``x`` (B, C, *) with the running statistics. They are constants: no gradient flows through them."""
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps)


class FederatedBatchNorm(_SharedNorm):
    """Normalise with the shared running statistics, also in training (FBN, Algorithm 2, line 3).

    The layer never updates the statistics, so they are constants during a round. ``observe`` records the moments of
    the training batches.
    """

    def normalised(self, x: Tensor) -> Tensor:
        """Normalise ``x`` (B, C, *) with the shared statistics, then scale and shift it."""
        self.check_input(x)
        if self.observation is not None:
            self.observation(self, x)
        return self.normalise_shared(x)


_OWN = ("weight", "bias", "mixing_logit", "running_mean", "running_var")


class HybridBatchNorm(_SharedNorm):
    """Normalise with a learnable mixture of batch and shared statistics, per channel (HBN, equations 9 and 10).

    In training, ``mean = a * batch + (1 - a) * shared`` with ``a = sigmoid(mixing_logit)``, and the same for
    the (biased) variance. Gradients flow through the batch statistics and ``a``. In evaluation the layer uses
    the shared statistics alone. In training, the layer is BatchNorm if ``a = 1``, and a frozen BatchNorm if
    ``a = 0``.

    The paper's distribution factor is ``sigmoid(mixing_logit)``.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._mix()

    @classmethod
    def from_batch_norm(cls, layer: _BatchNorm, fixed: float | None = None) -> Self:
        """Make a layer of this class with mixing logits, and with the tensors, mode, hooks and attributes of ``layer``.

        Args:
            layer: a BatchNorm layer with running statistics.
            fixed: the value of the mixing logits, which then do not learn. None: they start at 0 and learn.

        Raises:
            Unconvertible: ``layer`` has no running statistics, or averages them cumulatively
                (``momentum=None``).
        """
        new = super().from_batch_norm(layer)
        new._mix(fixed)
        return new

    def _mix(self, fixed: float | None = None) -> None:
        self.mixing_logit = nn.Parameter(torch.full_like(self.running_mean, fixed or 0.0), requires_grad=fixed is None)

    def normalised(self, x: Tensor) -> Tensor:
        """Normalise ``x`` (B, C, *) with the mixture in training, with the shared statistics in evaluation.

        Raises:
            ValueError: a training batch has only one value per channel, or the layer does not take the shape
                of ``x``.
        """
        self.check_input(x)
        if not self.training:
            if self.observation is not None:
                self.observation(self, x)
            return self.normalise_shared(x)
        if x.numel() <= x.shape[1]:
            raise ValueError(
                f"HybridBatchNorm needs more than 1 value per channel in training, but got {tuple(x.shape)}: drop batches of one "
                "sample (DataLoader(..., drop_last=True))"
            )
        transformed = inside_transform()
        batch = channel_moments(x if transformed else x.detach())
        if self.observation is not None:
            self.observation(self, x, batch)
        own, dtype = self._own(), batch[0].dtype
        if any(t is not None and t.dtype is not dtype for t in own):
            own = [t if t is None else t.to(dtype) for t in own]
        weight, bias, logit, mean, var = own
        return (plain if transformed else normalise)(x, (weight, bias), logit, (mean, var), batch, self.eps)

    def _own(self) -> list[Any]:
        """Return weight, bias, mixing logit, running mean and running variance, faster than by reading the module's attributes."""
        tensors = {**self._parameters, **self._buffers}
        return [tensors[name] if name in tensors else getattr(self, name) for name in _OWN]

    @torch.no_grad()
    def normaliser(self, batch: Moments) -> Moments:
        """Return the mean and variance with which this layer normalises a training batch (equation 9 of the HBN paper).

        They are a mixture of the moments of the batch, ``batch``, and of the running statistics that all clients share.
        """
        shared = (self.running_mean.double(), self.running_var.double())
        return Moments(batch.count, *mixture(torch.sigmoid(self.mixing_logit.double()), shared, (batch.mean, batch.var)))


CONSTANT = (FederatedBatchNorm, HybridBatchNorm)
"""Layers whose running statistics stay as the server sent them in every round."""


class InstanceNorm(nn.GroupNorm):
    """Normalise every channel of every instance by itself: a GroupNorm with one channel per group, without statistics."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise every channel of every instance of ``x`` (B, C, *).

        Raises:
            ValueError: ``x`` has no spatial extent.
        """
        if x.dim() < 3 or x[0, 0].numel() < 2:
            raise ValueError(
                f"instance normalisation of an input {tuple(x.shape)} has one value per instance and channel, "
                "so every output would be the bias: use method 'gn' or 'ln' for a model with BatchNorm after a linear layer"
            )
        return super().forward(x)


class Followed(Composed):
    """Add submodules, such as an activation, that are called on a layer's output. The layer may be of any class.

    Attributes:
        then: names of the submodules, in this order.
    """

    then: tuple[str, ...] = ()

    def forward(self, *args: Any, **named: Any) -> Any:
        """Call the layer, then each submodule that ``then`` names, on the output of the call before it."""
        y = super().forward(*args, **named)
        for name in self.then:
            y = getattr(self, name)(y)
        return y


def followed(layer: M, source: nn.Module, then: tuple[str, ...]) -> M:
    """Make ``layer`` call some submodules of ``source`` on its output, such as an activation, because ``source`` calls them.

    Args:
        layer: the new layer. It is changed in place.
        source: the layer that ``layer`` replaces.
        then: names of these submodules of ``source``, in the order of the calls. They become submodules of
            ``layer``, too. Empty: nothing is changed.

    Returns:
        ``layer``.

    Raises:
        Unconvertible: ``source`` has no such submodule.
    """
    if not then:
        return layer
    for name in then:
        if not isinstance(getattr(source, name, None), nn.Module):
            raise Unconvertible(
                f"{type(source).__name__} has no submodule {name!r}, which register_batch_norm(then={list(then)}) names: correct the name"
            )
        setattr(layer, name, getattr(source, name))
    if not isinstance(layer, _SharedNorm):
        layer.__class__ = composed(Followed, type(layer))
    layer.then = then  # type: ignore[assignment]
    return layer


def group_norm(layer: _BatchNorm, groups: int, kind: type[nn.GroupNorm] = nn.GroupNorm) -> nn.GroupNorm:
    """Make a GroupNorm with the affine parameters, dtype and device of ``layer``.

    Args:
        layer: the BatchNorm layer that it replaces.
        groups: the number of groups of channels. 0: one group per channel.
        kind: the class to make.

    Raises:
        Unconvertible: ``groups`` does not divide the number of channels.
    """
    groups = groups or layer.num_features
    if layer.num_features % groups:
        raise Unconvertible(f"{groups} groups do not divide {layer.num_features} channels: choose a divisor of every layer's width")
    new = kind(groups, layer.num_features, layer.eps, layer.affine)
    if layer.affine:
        new.to(layer.weight.device, layer.weight.dtype)
        new.load_state_dict({**new.state_dict(), **{key: tensor.detach() for key, tensor in layer.named_parameters(recurse=False)}})
    return _like(new, layer)


def _like(new: M, layer: _BatchNorm) -> M:
    for key in ("weight", "bias"):
        if getattr(layer, key) is None:  # with torch's BatchNorm(bias=False), only the bias is missing
            setattr(new, key, None)
        else:
            getattr(new, key).requires_grad_(getattr(layer, key).requires_grad)
    return new.train(layer.training)


def freeze_statistics(model: nn.Module, frozen: bool = True, layers: Container[str] | None = None) -> None:
    """Freeze the running statistics of BatchNorm layers, or end the freeze.

    In training, too, a frozen layer normalises with its running statistics and does not update them (FixBN, stage II).
    ``model.train()`` does not change that. Affine parameters are still trained. Dropout and all other layers are not
    affected.

    Args:
        model: changed in place.
        frozen: whether to freeze. False: the freeze of all layers ends. Layers that refill their statistics cease to.
        layers: names of the layers to freeze. The freeze of all other layers ends. None: all layers are frozen.
    """
    for name, layer in batch_norms(model).items():
        vars(layer).pop("refills", None)
        freezes = frozen and (layers is None or name in layers)
        if not isinstance(layer, OwnBatchNorm):
            if freezes:
                layer.__class__ = composed(FrozenBatchNorm, type(layer))
        elif isinstance(layer, FrozenBatchNorm):
            if not freezes:
                layer.__class__ = type(layer).kind  # type: ignore[assignment]
        elif freezes:
            layer.frozen = True
        else:
            vars(layer).pop("frozen", None)


def mixes_samples(layer: _BatchNorm) -> bool:
    """Return whether ``layer``, in its present mode, normalises a sample with statistics of the sample's own batch."""
    return not isinstance(layer, FederatedBatchNorm) and (layer.training or layer.running_mean is None)


def inputs(layer: nn.Module, seen: Moments) -> Moments:
    """Return ``seen``, the moments of a layer's input, unchanged. This is the default of ``observe``'s argument ``measure``."""
    return seen


def normalisers(layer: nn.Module, seen: Moments) -> Moments:
    """Return the mean and variance with which a layer in training normalises an input. The moments of the input are ``seen``.

    An HBN layer normalises with a mixture of ``seen`` and its shared statistics, any other layer with ``seen``.
    """
    return layer.normaliser(seen) if isinstance(layer, HybridBatchNorm) else seen


def in_backward() -> bool:
    """Return whether autograd's backward pass is running.

    A forward pass during a backward pass repeats an earlier one (activation checkpointing). While ``torch.compile``
    traces a network, the result is False.
    """
    if torch.compiler.is_compiling():
        return False
    return bool(torch._C._current_graph_task_id() != -1)  # torch.utils.checkpoint tests it in the same way


def is_traced() -> bool:
    """Return whether ``torch.jit.trace`` records the call."""
    return bool(torch.jit.is_tracing())  # type: ignore[attr-defined, no-untyped-call]


def learns_from_pass(module: nn.Module) -> bool:
    """Return whether a forward pass of ``module``, made now, is a training pass.

    ``module`` is in training mode, and gradients are enabled. The pass is no repetition (``in_backward``), and
    ``torch.jit.trace`` does not record it.
    """
    return module.training and torch.is_grad_enabled() and not is_traced() and not in_backward()


def itself(x: Tensor) -> Tensor:
    """Return ``x`` unchanged. This is the default of ``observe``'s argument ``values``."""
    return x


def whole(x: Tensor) -> Tensor:
    """Return the values of ``x`` as an ordinary tensor without gradients, also inside transformations of ``torch.func``.

    Inside a ``torch.func.vmap`` over B samples, ``x`` looks like one sample of shape (1, C, *). But it wraps the values of
    all B samples. This function returns them as one batch (B, C, *). With several nested ``vmap``, the dimension of each
    one is merged into dimension 0.
    """
    functorch = torch._C._functorch
    while torch._C._are_functorch_transforms_active() and functorch.is_functorch_wrapped_tensor(x):
        rows = functorch.maybe_get_bdim(x) if functorch.is_batchedtensor(x) else None
        x = functorch.get_unwrapped(x)
        if rows is not None:
            x = x.movedim(rows, 0)
            x = x.flatten(0, 1) if x.dim() > 1 else x
    return x.detach()


def always(layer: nn.Module, x: Tensor) -> bool:
    """Return True. As the default of ``observe``'s argument ``counts``, this function lets it record every forward pass."""
    return True


def eagerly(function: F_) -> F_:
    """Return ``function`` as a function that ``torch.compile`` does not compile, but runs in Python.

    ``eagerly`` does not import torch's compiler, because that import is slow.
    """

    @wraps(function)
    def call(*args: Any, **named: Any) -> Any:
        if "torch._dynamo" not in sys.modules:
            return function(*args, **named)
        return torch.compiler.disable(function)(*args, **named)

    call._torchdynamo_disable = True  # type: ignore[attr-defined]  # torch.compiler.disable sets the same marks
    call._torchdynamo_disable_msg = (  # type: ignore[attr-defined]  # a part of torch's error with fullgraph=True
        "fl-bn measures or exchanges the statistics of this batch in Python: call torch.compile(..., fullgraph=False)"
    )
    return cast(F_, call)


class Observation:
    """Record the moments of one layer's inputs. A copy or a pickle of the layer has no ``Observation``."""

    def __init__(
        self,
        record: Callable[[nn.Module, Moments], None],
        counts: Callable[[nn.Module, Tensor], bool],
        outer: Observation | None = None,
        values: Callable[[Tensor], Tensor] = itself,
    ) -> None:
        """Set the functions that select and record the inputs.

        Args:
            record: ``(layer, moments)``, called for every input for which ``counts`` returns True.
            counts: ``(layer, x) -> bool``, whether an input is recorded.
            outer: the layer's previous ``Observation``, which is also called for every input. None: there is none.
            values: a function that is applied to an input inside a transformation of ``torch.func``. ``whole`` returns
                the rows of all ``vmap`` dimensions as one batch. ``itself`` changes nothing.
        """
        self._record, self._counts, self._outer, self._values = record, counts, outer, values

    @eagerly
    def __call__(self, layer: nn.Module, x: Tensor, batch: tuple[Tensor, Tensor] | None = None) -> None:
        """Record the moments of the input ``x`` (B, C, *), if ``counts`` returns True for it.

        Args:
            layer: the layer.
            x: its input.
            batch: mean and biased variance of ``x``, (C,) each, if the layer has computed them.
        """
        if self._outer is not None:
            self._outer(layer, x, batch)
        if torch._C._are_functorch_transforms_active() and (values := self._values(x)) is not x:
            x, batch = values, None
        if not self._counts(layer, x):
            return
        if batch is None:
            self._record(layer, Moments.of(x))
        else:
            self._record(layer, Moments(x.numel() // x.shape[1], batch[0].detach().double(), batch[1].detach().double()))

    def __deepcopy__(self, memo: Any) -> None:
        return None

    def __reduce__(self) -> Any:
        return _nobody, ()


def _nobody() -> None:
    return None


@contextmanager
def observe(
    model: nn.Module,
    measure: Callable[[nn.Module, Moments], Moments] = inputs,
    counts: Callable[[nn.Module, Tensor], bool] = always,
    values: Callable[[Tensor], Tensor] = itself,
) -> Iterator[dict[str, list[Moments]]]:
    """Record the moments of every BatchNorm layer's input during the ``with`` block.

    Layers whose statistics the model's owner has frozen (``modes.held_layers``) are left out. Layers of this project
    record by their attribute ``observation``, torch's own layers by a hook that is removed after the block. Such hooks
    have no effect in a compiled network. ``pooled`` combines the result.

    Args:
        model: the network.
        measure: ``(layer, moments of the input) -> moments``, returns the moments to record.
        counts: ``(layer, x) -> bool``, whether a pass is recorded.
        values: applied to a layer's input before its moments are computed, but only inside a transformation of ``torch.func``.
            With ``whole``, the samples of all ``vmap`` dimensions count as one batch. ``itself`` changes nothing.

    Yields:
        A list for each layer, by name, with one ``Moments`` per forward pass.
    """
    held = held_layers(model)
    layers = {name: layer for name, layer in batch_norms(model).items() if name not in held}
    observed: dict[str, list[Moments]] = {name: [] for name in layers}

    def of(name: str, outer: Observation | None = None) -> Observation:
        return Observation(lambda layer, seen: observed[name].append(measure(layer, seen)), counts, outer, values)

    with ExitStack() as stack:
        for name, layer in layers.items():
            if isinstance(layer, OwnBatchNorm) and not isinstance(layer, FrozenBatchNorm):
                before = vars(layer).get("observation")
                layer.observation = of(name, before)
                stack.callback(_observed_by, layer, before)
                continue
            observation = of(name)

            def hook(layer: nn.Module, args: Any, named: Any, observation: Observation = observation) -> None:
                observation(layer, *args, *named.values())

            stack.callback(layer.register_forward_pre_hook(hook, with_kwargs=True).remove)
        yield observed


def _observed_by(layer: OwnBatchNorm, observation: Observation | None) -> None:
    if observation is None:
        vars(layer).pop("observation", None)
    else:
        layer.observation = observation


def pooled(observed: dict[str, list[Moments]]) -> dict[str, Moments]:
    """Pool the moments that ``observe`` recorded, for each layer. Layers that received no input are left out."""
    return {name: pool(parts) for name, parts in observed.items() if parts}


def moving_average(layer: _BatchNorm, batches: Sequence[Moments]) -> Moments:
    """Return the running statistics of ``layer`` after it has seen ``batches`` in order, as torch's BatchNorm updates them.

    Args:
        layer: a BatchNorm layer with running statistics and a momentum. It is not changed.
        batches: the moments of the batches.

    Returns:
        Mean and unbiased variance in float64, with the count of all batches together.
    """
    assert layer.running_mean is not None
    assert layer.running_var is not None
    assert layer.momentum is not None
    running = Running(layer.running_mean, layer.running_var)
    for batch in batches:
        running = ema(running, batch.to(layer.running_mean.device), layer.momentum)
    return Moments(sum(batch.count for batch in batches), *running)
