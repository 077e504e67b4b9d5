"""Let a run name a class of the user's own that changes it where no run-config key does.

The key ``setup`` names the class. Its options are run-config keys of the run:

    @dataclass(frozen=True)
    class Darker(Setup):
        darkness: int = option(2, "factor by which images are darker", ">= 1")  # the run-config key darkness

        def dataset(self, config):
            data = super().dataset(config)
            return replace(data, x_train=data.x_train // self.darkness)

    fl-bn run --run-config "setup='mine:Darker' darkness=4"
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, cast

from torch import nn

from fl_bn.app.errors import ConfigError
from fl_bn.data.dataset import Dataset, load
from fl_bn.data.record import TEST
from fl_bn.federation.local import Samples
from fl_bn.federation.record import RoundRecord
from fl_bn.methods import Method
from fl_bn.options import Options, options_by_key, own_options
from fl_bn.support.names import short
from fl_bn.support.user_code import OWN, Modules, function

if TYPE_CHECKING:
    from fl_bn.app.config import RunConfig

_modules = Modules.of(None, OWN)


def modules() -> Modules:
    """Return the modules whose functions run configs may name in this process."""
    return _modules


def allow(allowed: Modules) -> None:
    """Set the modules whose functions run configs may name in this process."""
    global _modules
    _modules = allowed


class Measurements(Protocol):
    """Measure the global model after a round."""

    def after_round(self, record: RoundRecord, model: nn.Module) -> Sequence[Any]:
        """Return the lines of diagnostics.csv, named tuples ``(round, layer, client, quantity, value)``."""


@dataclass(frozen=True)
class Setup(Options):
    """Change the parts of a run as they are made. This class changes nothing; derive your own from it.

    A class with options is a frozen dataclass, too. Results may be cached in each
    process, so they must depend on arguments and options alone.
    """

    name: ClassVar[str] = "setup"
    prefix: ClassVar[str | None] = ""

    def dataset(self, config: RunConfig) -> Dataset:
        """Return the data of the run, before a domain or validation samples are held out."""
        return load(config.dataset, config.data_path, config.image_size, modules())

    def network(self, config: RunConfig, make: Callable[..., nn.Module]) -> nn.Module:
        """Return the network of the run, before its conversion.

        Args:
            config: The run config.
            make: Makes the network, with the run's weights; takes arguments of
                ``fl_bn.models.build`` by name.
        """
        return make()

    @property
    def attackers(self) -> int:
        """Return how many clients attack: the last ones, which get no data of their own."""
        return 0

    @property
    def split(self) -> str:
        """Return the samples on which the run is tested, in words, if not on validation samples."""
        return TEST

    def method(self, config: RunConfig, method: Method) -> Method:
        """Return the method of the run, with the changes of this setup.

        Args:
            config: The run config.
            method: The method with its options, and with the freeze of
                ``freeze-after``.
        """
        return method

    def samples(self, config: RunConfig, client: int, train: Samples) -> Samples:
        """Return the training samples of a client, given those that the partition made."""
        return train

    def measurements(self, config: RunConfig) -> Measurements | None:
        """Return what is measured after every round of a simulation, for diagnostics.csv, if anything."""
        return None

    def arguments(self, constructor: object) -> dict[str, Any]:
        """Return the arguments of a method, optimizer, ... that have no run-config key.

        An option of a setup with the key of such an argument (``hbn-mixing`` of
        ``hbn``'s ``mixing``) gives its value.
        """
        own, hidden = _own(cast(Any, type(self))), options_by_key(constructor, hidden=True)
        given = [(spec, getattr(self, own[key])) for key, spec in hidden.items() if key in own]
        return {spec.field: value for spec, value in given if value != spec.unset}


@cache
def _own(kind: Any) -> dict[str, str]:
    return {spec.name: name for name, spec in own_options(kind).items()}


def setup_class(name: str) -> type[Setup]:
    """Return the class that the key ``setup`` names, or ``Setup`` itself.

    If there is no such class, or its module is not allowed, ``ConfigError`` is
    raised.
    """
    return _setup_class(name, _modules)


@lru_cache(maxsize=8)
def _setup_class(name: str, allowed: Modules) -> type[Setup]:
    if not name:
        return Setup
    try:
        found = function("a setup", name, allowed)
    except (ValueError, ImportError) as error:
        raise ConfigError(f"setup={short(name)}: {error}") from error
    if not (isinstance(found, type) and issubclass(found, Setup)):
        raise ConfigError(f"setup={name!r} must name a class that derives from fl_bn.app.setup.Setup, but got {found!r}")
    return found
