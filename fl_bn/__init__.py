"""Batch normalisation that works in federated learning, for any PyTorch network, on Flower."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fl_bn.conversion import convert

__version__ = "0.1.0"
__all__ = ["__version__", "convert"]


def __getattr__(name: str) -> Any:
    """``convert`` when it is first asked for: torch takes seconds to import, and commands such as ``fl-bn start`` need none of it."""
    if name == "convert":
        from fl_bn.conversion import convert

        return convert
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
