"""Check that a network consists of the same layers and parameters at the end of a round as at its start."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from fl_bn.federation.client import LocalRound


class MadeOf:
    """Remember the modules, parameters and persistent buffers of a network, which a round reads and sends.

    A loop must not add or remove any of them, nor replace a module or a parameter. It may assign a new tensor to a buffer.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._modules, self._parameters, self._buffers = self._now()

    def _now(self) -> tuple[dict[str, nn.Module], dict[str, nn.Parameter], set[str]]:
        model = self._model
        modules = dict(model.named_modules(remove_duplicate=False))
        buffers = {  # one that is not persistent is in no state_dict, so it does not travel: the network may make it when it needs it
            f"{name}.{own}" if name else own
            for name, module in model.named_modules()
            for own, buffer in module._buffers.items()
            if buffer is not None and own not in module._non_persistent_buffers_set
        }
        return modules, dict(model.named_parameters(remove_duplicate=False)), buffers

    @contextmanager
    def unchanged(self, round: LocalRound, buffers: bool = True) -> Iterator[None]:
        """Check, after a ``with`` block without an error, that the network still consists of the same modules and parameters.

        Args:
            round: The round. The error message gives its number.
            buffers: Whether persistent buffers must be the same ones, too.

        Raises:
            ValueError: A module or a parameter is new, missing, or another object; or a buffer is new or missing.
        """
        yield
        modules, parameters, now_buffers = self._now()
        for kind, then, now in (("layer", self._modules, modules), ("parameter", self._parameters, parameters)):
            for name in (*then, *now):
                if then.get(name) is not now.get(name):
                    self._refuse(round, kind, name, name not in now, name not in then)
        for name in sorted(now_buffers ^ self._buffers) if buffers else ():
            self._refuse(round, "buffer", name, name not in now_buffers, name in now_buffers)

    def _refuse(self, round: LocalRound, kind: str, name: str, gone: bool, new: bool) -> None:
        what = "removed" if gone else "added" if new else "replaced"
        when = f"during round {round.instruction.round}" if round.instruction.round else "before round 1"
        raise ValueError(
            f"{kind} {name!r} of {'round.model' if round.in_own_loop else 'the network'} was {what} {when}, "
            "but the round trains and sends the network as it was at its start: change the network before "
            "convert(net, method) or Federation, and make all layers in __init__. Set values in place (tensor.copy_(...), "
            "load_state_dict(...) without assign=True)"
        )


def same_layers(round: LocalRound) -> AbstractContextManager[None]:
    """Return a context that checks, in a client's first round, that the network makes no layers while it runs."""
    return nullcontext() if round.kept.round else MadeOf(round.model).unchanged(round, buffers=False)
