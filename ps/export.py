"""Public name of ``ps.client.export``: export tables' weights for inference, and open such exports."""

from __future__ import annotations

from ps.client.export import Export, Exported, export_checkpoint, export_cut, export_running, open, write

__all__ = ["Export", "Exported", "export_checkpoint", "export_cut", "export_running", "open", "write"]
