"""The public name of ``ps.client.export``: write the weights of tables for inference, and open what was written."""

from __future__ import annotations

from ps.client.export import Export, Exported, export_cut, export_running, open, write

__all__ = ["Export", "Exported", "export_cut", "export_running", "open", "write"]
