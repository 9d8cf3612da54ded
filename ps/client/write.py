"""The writing half of a client: one push at a time, each with a sequence number."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edl.errors import PsError
from edl.job_records import Mode
from ps.background import Background, BackgroundJob
from ps.client import dedup, routing
from ps.client.arguments import as_keys, as_op, as_rows
from ps.client.core import PUSH, Core
from ps.client.dedup import DistinctKeys
from ps.client.push_intents import Records, declare
from ps.client.requests import PushRequest
from ps.protocol.frames import MOST_BODY
from ps.protocol.half_precision import WIRE_DTYPES, wire_of
from ps.protocol.messages import NO_PSERVER
from ps.rows import RowOp, TablePush
from ps.store import damage

Wrote = Callable[[TablePush], None]


class RowWriter:
    """Pushes values to the pservers."""

    def __init__(self, core: Core, wrote: Wrote, stepped: Callable[[], None]) -> None:
        """``wrote`` is called with each part of an applied push, ``stepped`` after each step."""
        self._core, self._wrote, self._stepped = core, wrote, stepped
        self._lock = threading.RLock()
        self._background = Background("ps-push")
        self._outstanding: BackgroundJob | None = None
        self._seq = 0

    def push(
        self, values: Mapping[str, tuple[Any, Any]], op: str, *, wait: bool = True, steps: bool = True,
        records: Records | None = None, back: Sequence[str] = (),
    ) -> dict[str, NDArray[np.float32]]:  # fmt: skip
        """Push, per table, keys and one row for each key (``(*keys.shape, dim)``), and wait until it is applied, unless
        ``wait`` is false. ``steps``: gradients end a step. ``back``: return the updated rows of these tables."""
        result = self.begin(values, op, wait=wait, steps=steps, records=records, back=back)
        return result() if wait else {}

    def begin(
        self, values: Mapping[str, tuple[Any, Any]], op: str, *, wait: bool, steps: bool = True,
        records: Records | None = None, back: Sequence[str] = (),
    ) -> Callable[[], dict[str, NDArray[np.float32]]]:  # fmt: skip
        """Begin a push, in the background without ``wait``, except in mode sync. The returned function waits for it,
        and returns the updated rows of the tables in ``back``; it raises the error of the push."""
        core = self._core
        as_op(op)
        with self._lock:
            self.flush()
            route = core.session.route
            parts, united = [], []
            for table, (given, rows) in values.items():
                part, one = self._part(route, table, given, rows, op)
                parts.append(part)
                united.append(one)
            ends = op == RowOp.GRAD and steps
            training = core.session.joined.training
            parts, wires, clipped = self._checked(parts, op, together=ends and training.mode is Mode.SYNC)
            clocked = ends and (training.mode is Mode.SYNC or (training.mode is Mode.ASYNC and training.staleness > 0))
            _check_sizes(route, parts, united, wires)
            self._seq += 1
            rows = {
                part.table: np.empty((len(part.keys), part.grads.shape[1]), np.float32)
                for part in parts if part.table in back
            }  # fmt: skip
            request = PushRequest(
                parts, core.session.number, self._seq, core.step, core.session.joined.epoch, wires, 1.0,
                core.bases.of_push(ends=ends), clocked, redo=records.redo if records is not None else None, back=rows,
                back_dtypes={table: wire_of(core.spec(table), core.options.wire) for table in rows},
            )  # fmt: skip
            sub_requests = routing.first_split(route, united)
            intent = records.text if records is not None and records.redo is None else ""

            def work(stands: bool) -> None:
                if intent:
                    declare(core, request.seq, intent)
                core.fan_out(request, sub_requests, route, PUSH, _named(values), stands=stands)
                core.bases.pulled(request.applied, trains=False)
                if clocked:  # a new trainer continues at the step of the others
                    core.step = max([core.step, *(int(head.get("step", 0)) for head in request.heads)])
                core.tally.add(pushes=1, again=request.total("again"), damaged=request.total("damaged") + clipped)
                for part in parts:
                    self._wrote(part)

            job: BackgroundJob | None = None
            if wait or training.mode is Mode.SYNC:
                work(True)
            else:
                job = self._outstanding = self._background.submit(lambda: work(False))
            if ends:
                self.end_step()

        def result() -> dict[str, NDArray[np.float32]]:
            if job is not None:
                job.result()
            pairs = zip(parts, united, strict=True)
            return {part.table: _spread(rows[part.table], one) for part, one in pairs if part.table in rows}

        return result

    def _checked(
        self, parts: Sequence[TablePush], op: str, *, together: bool
    ) -> tuple[list[TablePush], list[str], int]:
        """Check all parts, before anything is sent; return them with gradients that fit into their number formats on
        the network, these formats, and how many values were clipped for that. ``together``: the gradients of all
        trainers are summed."""
        found, wires, clipped = [], [], 0
        trainers = damage.TOGETHER if together else 1
        for part in parts:
            spec = self._core.spec(part.table)
            wires.append(wire_of(spec, self._core.options.wire) if op == RowOp.GRAD else "f4")
            damage.check(spec, part.keys, part.grads, op, wires[-1], trainers)
            grads, count = damage.fitted(spec, part.grads, op, wires[-1])
            found.append(TablePush(part.table, part.keys, grads, part.op))
            clipped += count
        return found, wires, clipped

    def end_step(self) -> None:
        """Count one more completed step."""
        self._core.step += 1
        self._stepped()

    def flush(self) -> None:
        """Wait for the push in the background, if there is one. Raises its error."""
        with self._lock:
            job, self._outstanding = self._outstanding, None
        if job is not None:
            job.result()

    def look(self) -> None:
        """Raise the error of a background push that has failed; does not wait."""
        job = self._outstanding
        if job is not None and job.done:
            self.flush()

    def close(self) -> None:
        """Stop the background thread after its last push."""
        self._background.close()

    def _part(
        self, route: routing.RoutingTable, table: str, given: Any, values: Any, op: str
    ) -> tuple[TablePush, DistinctKeys]:
        spec, keys = self._core.spec(table), as_keys(table, given)
        rows = as_rows(spec, keys.shape, values, "gradients" if op == RowOp.GRAD else "values")
        one = route.unite(keys.reshape(-1))
        if op in (RowOp.GRAD, RowOp.ADD):
            return TablePush(table, one.keys, dedup.sum_rows(rows, one), op), one
        last = np.empty((len(one.keys), spec.dim), np.float32)
        last[one.inverse] = rows  # of several values for one key the last wins
        return TablePush(table, one.keys, last, op), one


def _named(tables: Iterable[str]) -> str:
    return f"a push to {', '.join(tables) or 'no table'}"


def _check_sizes(
    route: routing.RoutingTable, parts: Sequence[TablePush], united: Sequence[DistinctKeys], wires: Sequence[str]
) -> None:
    """Raise ``PsError`` if the part for a pserver does not fit into one request."""
    each = [8 + part.grads.shape[1] * WIRE_DTYPES[wire].itemsize for part, wire in zip(parts, wires, strict=True)]
    for place, number in enumerate(route.owners):
        counts = [one.bounds[place + 1] - one.bounds[place] for one in united]
        size = sum(count * some for count, some in zip(counts, each, strict=True))
        if size > MOST_BODY and number != NO_PSERVER:
            tables = ", ".join(part.table for part in parts)
            raise PsError(
                f"a push to {tables} has {size:,} bytes for pserver {route.name(number)}, and a request at most "
                f"{MOST_BODY:,}; nothing of it was applied. Start more pservers, or push less at a time"
            )


def _spread(rows: NDArray[np.float32], united: DistinctKeys) -> NDArray[np.float32]:
    if united.inverse is None:
        return rows
    out = np.empty((len(united.inverse), rows.shape[1]), np.float32)
    dedup.spread(rows, united, out)
    return out
