"""Old name of ``data_service.formats``, for existing scripts."""

from data_service.formats import Reader, open_reader

__all__ = ["Reader", "open_reader"]
