"""Record the moments of BatchNorm inputs, and tell which passes train."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import wraps
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fl_bn.bn.layers import FrozenBatchNorm, HybridBatchNorm, OwnBatchNorm
from fl_bn.bn.modules import held_layers
from fl_bn.bn.moments import Moments, Running, ema, pool
from fl_bn.bn.roles import batch_norms

F_ = TypeVar("F_", bound=Callable[..., Any])


def normalisers(layer: nn.Module, seen: Moments) -> Moments:
    """Return what normalises an input of moments ``seen``: these, or HBN's mixture."""
    return layer.normaliser(seen) if isinstance(layer, HybridBatchNorm) else seen


def in_backward() -> bool:
    """Return whether a backward pass is running, in which a forward pass is a repetition.

    In a trace of ``torch.compile`` the result is False.
    """
    if torch.compiler.is_compiling():
        return False
    return bool(torch._C._current_graph_task_id() != -1)  # torch.utils.checkpoint tests it in the same way


def is_traced() -> bool:
    """Return whether ``torch.jit.trace`` records the call."""
    return bool(torch.jit.is_tracing())  # type: ignore[attr-defined, no-untyped-call]


def learns_from_pass(module: nn.Module) -> bool:
    """Return whether a forward pass of ``module`` now trains: training mode, gradients.

    Repetitions in a backward pass and traces do not.
    """
    return module.training and torch.is_grad_enabled() and not is_traced() and not in_backward()


def whole(x: Tensor) -> Tensor:
    """Return ``x`` as an ordinary tensor without gradients, also inside ``torch.func``.

    In a ``torch.func.vmap`` over B samples, ``x`` looks like one sample (1, C, *).
    The result is (B, C, *), where nested ``vmap`` merge into dimension 0.
    """
    functorch = torch._C._functorch
    while torch._C._are_functorch_transforms_active() and functorch.is_functorch_wrapped_tensor(x):
        rows = functorch.maybe_get_bdim(x) if functorch.is_batchedtensor(x) else None
        x = functorch.get_unwrapped(x)
        if rows is not None:
            x = x.movedim(rows, 0)
            x = x.flatten(0, 1) if x.dim() > 1 else x
    return x.detach()


def eagerly(function: F_) -> F_:
    """Return ``function``, not compiled, without the slow import of ``torch.compile``."""

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


def uncompiled() -> AbstractContextManager[Any]:
    """Return a context in which compiled networks run as plain PyTorch, with hooks."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


class Uncopied:
    """Be None in a copy or a pickle of the layer."""

    def __deepcopy__(self, memo: Any) -> None:
        return None

    def __reduce__(self) -> Any:
        return type(None), ()


class Observation(Uncopied):
    """Record the moments of a layer's inputs."""

    def __init__(
        self,
        record: Callable[[nn.Module, Moments], None],
        counts: Callable[[nn.Module, Tensor], bool] | None,
        outer: Observation | None = None,
        values: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """Set what selects and records the inputs.

        Args:
            record: ``(layer, moments)``, called for recorded inputs.
            counts: ``(layer, x) -> bool``: whether to record. None: always.
            outer: the layer's previous ``Observation``, called for every input.
            values: see ``observe``.
        """
        self._record, self._counts, self._outer, self._values = record, counts, outer, values

    @eagerly
    def __call__(self, layer: nn.Module, x: Tensor, batch: tuple[Tensor, Tensor] | None = None) -> None:
        """Record the moments of ``x`` (B, C, *), if ``counts`` says so.

        ``batch`` is mean and biased variance of ``x``, if the layer has computed
        them.
        """
        if self._outer is not None:
            self._outer(layer, x, batch)
        if self._values is not None and torch._C._are_functorch_transforms_active():
            x, batch = self._values(x), None
        if not x.numel() or not (self._counts is None or self._counts(layer, x)):  # an expert to which no sample was sent, say
            return
        if batch is None:
            self._record(layer, Moments.of(x))
        else:
            self._record(layer, Moments(x.numel() // x.shape[1], batch[0].detach().double(), batch[1].detach().double()))


@contextmanager
def observe(
    model: nn.Module,
    measure: Callable[[nn.Module, Moments], Moments] | None = None,
    counts: Callable[[nn.Module, Tensor], bool] | None = None,
    values: Callable[[Tensor], Tensor] | None = None,
) -> Iterator[dict[str, list[Moments]]]:
    """Record the moments of every BatchNorm input during the ``with`` block.

    Layers frozen by the owner (``held_layers``) are left out. fl-bn's layers record
    by ``observation``, torch's by a hook, which has no effect in a compiled
    network.

    Args:
        model: the network.
        measure: ``(layer, moments of the input) -> moments`` to record. None: the
            given ones.
        counts: ``(layer, x) -> bool``: whether to record. None: always.
        values: applied to an input inside ``torch.func``. With ``whole``, the
            samples of all ``vmap`` dimensions are one batch.

    Yields:
        A list per layer name, with one ``Moments`` per forward pass.
    """
    held = held_layers(model)
    layers = {name: layer for name, layer in batch_norms(model).items() if name not in held}
    observed: dict[str, list[Moments]] = {name: [] for name in layers}

    def of(name: str, outer: Observation | None = None) -> Observation:
        def record(layer: nn.Module, seen: Moments) -> None:
            observed[name].append(seen if measure is None else measure(layer, seen))

        return Observation(record, counts, outer, values)

    with ExitStack() as stack:
        for name, layer in layers.items():
            if isinstance(layer, OwnBatchNorm) and not isinstance(layer, FrozenBatchNorm):
                stack.callback(setattr, layer, "observation", layer.observation)
                layer.observation = of(name, layer.observation)
                continue
            observation = of(name)

            def hook(layer: nn.Module, args: Any, named: Any, observation: Observation = observation) -> None:
                observation(layer, *args, *named.values())

            stack.callback(layer.register_forward_pre_hook(hook, with_kwargs=True).remove)
        yield observed


def pooled(observed: dict[str, list[Moments]]) -> dict[str, Moments]:
    """Pool the recorded moments per layer, without layers that got no input."""
    return {name: pool(parts) for name, parts in observed.items() if parts}


def moving_average(layer: _BatchNorm, batches: Sequence[Moments]) -> Moments:
    """Return ``layer``'s running statistics after ``batches``, updated as in torch.

    They have the count of all batches and the unbiased variance, in float64.
    """
    assert layer.running_mean is not None
    assert layer.running_var is not None
    assert layer.momentum is not None
    running = Running(layer.running_mean, layer.running_var)
    for batch in batches:
        running = ema(running, batch.to(layer.running_mean.device), layer.momentum)
    return Moments(sum(batch.count for batch in batches), *running)
