"""fl-bn: batch normalisation that works in federated learning."""

from fl_bn.conversion import convert

__version__ = "0.1.0"
__all__ = ["__version__", "convert"]
