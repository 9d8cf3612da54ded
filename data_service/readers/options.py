"""Old name of ``data_service.formats.options``."""

from data_service.formats.options import FormatOptions as Options

__all__ = ["Options"]
