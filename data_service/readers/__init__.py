"""The old name of ``data_service.formats``, for scripts written against it."""

from data_service.formats import Reader, open_reader

__all__ = ["Reader", "open_reader"]
