"""Old name of ``data_service.formats``, for existing scripts."""

from data_service.formats import FormatReader as Reader
from data_service.formats import open_reader

__all__ = ["Reader", "open_reader"]
