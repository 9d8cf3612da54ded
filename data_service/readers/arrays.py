"""Old name of ``data_service.formats.arrays``."""

from data_service.formats.arrays import from_numpy, to_numpy

__all__ = ["from_numpy", "to_numpy"]
