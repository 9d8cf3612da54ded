"""Public name of ``ps.client.export`` and ``export_changes``: export tables' weights for inference, and open such
exports."""

from __future__ import annotations

from ps.client.export import Export, Exported, export_checkpoint, export_cut, export_running, open, write
from ps.client.export_changes import LayeredExport, export_changes

__all__ = [
    "Export", "Exported", "LayeredExport", "export_changes", "export_checkpoint", "export_cut", "export_running",
    "open", "write",
]  # fmt: skip
