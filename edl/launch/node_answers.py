"""What this launcher answers to commands about its own node."""

from __future__ import annotations

from edl.agent.workers.workers import WorkerGroup
from edl.wire.node_requests import OptionValue, OptionValues, OutputLines, OutputRequest, StacksRequest


class NodeAnswers:
    """``edl.adapters.transport.NodeService`` of a launcher."""

    def __init__(self, workers: WorkerGroup, options: tuple[OptionValue, ...]) -> None:
        self._workers = workers
        self._options = OptionValues(options)

    def output(self, request: OutputRequest) -> OutputLines:
        """Recent output of the workers."""
        return self._workers.output(request)

    async def stacks(self, request: StacksRequest) -> OutputLines:
        """The stacks of living workers."""
        return await self._workers.stacks(request)

    def options(self) -> OptionValues:
        """The launcher's options."""
        return self._options
