"""Bireme trains neural networks that do not fit on one device, over few, unequal, slowly joined machines.

The package's own namespace stays light: importing `bireme` imports no torch.
"""

__all__ = ["BiremeError", "__version__"]

from bireme.errors import BiremeError

__version__ = "0.1.0"
