"""Conversion of any input to Arrow IPC files, which are memory-mapped when read, optionally with packed columns.

The work is divided into tasks of one output file each, determined only by the inputs and the recipe. A file is written
under a temporary name, synced, renamed and then recorded in a list. So a killed conversion is continued by the same
command and yields the same bytes as an uninterrupted one.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, replace
from multiprocessing import connection
from typing import Any

import pyarrow as pa
from pyarrow import ipc

from data_service.convert.recipe import Recipe
from data_service.filesystems import FilePath, FilePaths
from data_service.formats import open_reader
from data_service.formats.options import FormatOptions
from data_service.manifest import UNKNOWN, Manifest, ShardRef, counted
from data_service.scan import SHARD_BYTES, Say, scan, settle_types
from edl.arithmetic.permutation import Permutation, key
from edl.errors import DataError, EdlError, SettingError

VERSION = 1
PLAN = "_convert.json"
DONE = "_done.jsonl"
LOCK = "_lock"
UNFINISHED = ".tmp"


@dataclass(frozen=True, slots=True)
class ConversionTask:
    """The shards that make up one output file."""

    output: str
    """Name of the output file."""
    refs: tuple[ShardRef, ...]
    size_bytes: int
    """Approximate size of the input."""


@dataclass(frozen=True, slots=True)
class Written:
    """A finished output file, or the error that prevented it."""

    output: str
    records: int = 0
    size_bytes: int = 0
    error: str = ""


@dataclass(frozen=True, slots=True)
class ConversionProgress:
    """Progress of a conversion. Bytes are of the input."""

    done_bytes: int
    total_bytes: int
    files: int
    records: int


@dataclass(frozen=True, slots=True)
class Converted:
    """The content of the output folder after a conversion."""

    files: int
    records: int
    size_bytes: int
    found: int
    """Number of files that an earlier run had finished."""


@dataclass(frozen=True)
class ConversionJob:
    """Parameters of a conversion, as needed by a worker process."""

    output: str
    format: str
    recipe: Recipe
    options: FormatOptions
    storage_options: dict[str, Any]


def convert(
    patterns: FilePaths,
    output: FilePath,
    recipe: Recipe | None = None,
    *,
    format: str | None = None,
    shard_bytes: int = SHARD_BYTES,
    workers: int = 1,
    storage_options: Mapping[str, Any] | None = None,
    options: FormatOptions | None = None,
    say: Say | None = None,
    progress: Callable[[ConversionProgress], None] | None = None,
) -> Converted:
    """Write all records of the inputs (see ``scan``) as Arrow IPC files into a local folder, or continue doing so.

    ``workers``: number of processes; each holds a batch in memory, or a whole output file if records are shuffled.
    Raises ``DataError`` for unreadable inputs, for a folder that cannot be written to, and for one that contains
    anything but this conversion; ``SettingError`` for invalid options.
    """
    recipe, output = recipe or Recipe(), os.fspath(output)
    if "://" in output:
        raise SettingError("OUTPUT", output, "must be a local folder", "Copy the files to the store afterwards")
    if workers < 1:
        raise SettingError("--workers", workers, "must be at least 1")
    if workers > 1 and any("<" in getattr(one, "__qualname__", "") for one in _functions(options)):
        raise SettingError("--workers", workers, "other processes can only import functions defined at module level")
    access: dict[str, Any] = {"storage_options": storage_options}
    columns = recipe.needed(None)
    size: dict[str, Any] = {"shard_records": recipe.shard_records, "shard_bytes": shard_bytes}
    manifest = scan(patterns, format, columns=columns, options=options, say=say, **size, **access)
    settled = settle_types(manifest, columns, options=options, **access)
    job = ConversionJob(os.path.abspath(output), manifest.format, recipe, settled, dict(storage_options or {}))
    sample = next((file.path for file in manifest.files if file.size_bytes), None)
    if sample is not None and job.format != "user":
        ConversionWorker(job).try_out(sample)
    try:
        os.makedirs(job.output, exist_ok=True)
    except OSError as error:
        raise SettingError("OUTPUT", output, f"cannot be created ({error})") from None
    with _writing(job.output):
        _refuse_foreign(job.output)
    with _locked(job.output):
        return _run(job, manifest, workers, progress or (lambda now: None))


def _functions(options: FormatOptions | None) -> tuple[Any, ...]:
    return (options.read, options.shards) if options is not None else ()


def tasks_of(manifest: Manifest, file_bytes: int) -> list[ConversionTask]:
    """Group neighbouring shards by about ``file_bytes`` bytes of input; depends only on manifest and size."""
    tasks: list[ConversionTask] = []
    refs: list[ShardRef] = []
    size = 0.0

    def end() -> None:
        tasks.append(ConversionTask(f"part-{len(tasks):05d}.arrow", tuple(refs), round(size)))

    for file in manifest.files:
        shards = [manifest.ref(index) for index in range(file.first, file.first + file.shards)]
        whole = sum(ref.end - ref.begin for ref in shards) or 1
        for ref in shards:
            part = file.size_bytes * (ref.end - ref.begin) / whole if file.size_bytes else _guessed(ref)
            if refs and size + part > file_bytes:
                end()
                refs, size = [], 0.0
            refs.append(ref)
            size += part
    if refs:
        end()
    return tasks


def _guessed(ref: ShardRef) -> int:
    """Guessed size of a shard of something other than a file, in bytes."""
    return 1024 * ref.records if ref.records != UNKNOWN else SHARD_BYTES


# --- the folder ------------------------------------------------------------------------------------------------------


def _unwritable(folder: str, error: OSError) -> str:
    return f"cannot write to {folder}: {error}"


@contextlib.contextmanager
def _writing(folder: str) -> Iterator[None]:
    """Raise ``DataError`` for what the system refuses in this folder."""
    try:
        yield
    except OSError as error:
        advice = "Make it writable, and free some space; the same command continues"
        raise DataError(f"{_unwritable(folder, error)}. {advice}") from error


@contextlib.contextmanager
def _locked(folder: str) -> Iterator[None]:
    with contextlib.ExitStack() as held:
        with _writing(folder):
            lock = held.enter_context(open(os.path.join(folder, LOCK), "w"))
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise DataError(
                    f"{folder}: another conversion is writing to this folder. Wait for it, or stop it"
                ) from None
        yield


def _prepare(job: ConversionJob, manifest: Manifest) -> dict[str, Written]:
    """Claim the folder, remove unfinished files and return the finished ones."""
    _claim(job, manifest)
    for name in os.listdir(job.output):
        if name.endswith(UNFINISHED):
            os.unlink(os.path.join(job.output, name))
    return _finished(job)


def _claim(job: ConversionJob, manifest: Manifest) -> None:
    """Assign the folder to this conversion, or verify that it belongs to it. Raises ``DataError`` if it does not."""
    plan = {
        "version": VERSION,
        "inputs": manifest.digest,
        "files": len(manifest.files),
        "format": job.format,
        "recipe": json.loads(json.dumps(asdict(job.recipe))),
        "options": _in_words(job.options),
    }
    path = os.path.join(job.output, PLAN)
    try:
        with open(path, encoding="utf-8") as file:
            before = json.load(file)
    except FileNotFoundError:
        _refuse_foreign(job.output)
        _write_plan(job, plan)
        return
    except ValueError as error:
        raise DataError(f"{path}: damaged ({error}). Remove the folder and convert again") from None
    differing = _differing(before, plan)
    if differing and _is_begun(job.output):
        advice = "Use the same inputs and options to continue it, or another folder"
        raise DataError(f"{job.output}: contains a conversion with different {', '.join(differing)}. {advice}")
    if differing:  # for example options that were corrected before any file could be written
        _write_plan(job, plan)


def _write_plan(job: ConversionJob, plan: dict[str, Any]) -> None:
    path = os.path.join(job.output, PLAN)
    with open(path + UNFINISHED, "w", encoding="utf-8") as file:
        json.dump(plan, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    os.replace(path + UNFINISHED, path)
    _sync(job.output)


def _differing(before: Any, plan: dict[str, Any]) -> list[str]:
    """Names of the parts that differ from another plan, as users know them; for a recipe, its fields."""
    if not isinstance(before, dict):
        return list(plan)
    found = [name for name in plan if before.get(name) != plan[name]]
    recipe = before.get("recipe")
    if "recipe" in found and isinstance(recipe, dict):
        place = found.index("recipe")
        found[place : place + 1] = [name for name, value in plan["recipe"].items() if recipe.get(name) != value]
    return found


def _is_begun(folder: str) -> bool:
    """True if an output file, or a record of one, exists."""
    return any(name not in (LOCK, PLAN) and not name.endswith(UNFINISHED) for name in os.listdir(folder))


def _refuse_foreign(folder: str) -> None:
    """Refuse a folder with other content. Raises ``DataError`` for a folder that is not empty and has no plan."""
    names = os.listdir(folder)
    others = sorted(name for name in names if name not in (LOCK, PLAN + UNFINISHED))
    if others and PLAN not in names:
        text = f"{folder}: contains {others[0]} and no conversion. Use another folder, or an empty one"
        raise DataError(text)


def _in_words(options: FormatOptions) -> dict[str, Any]:
    """The options for the plan; functions by name, even if they cannot be imported by it."""
    for name in ("read", "shards"):
        function = getattr(options, name)
        if callable(function):
            changed: Any = {name: f"{function.__module__}:{function.__qualname__}"}
            options = replace(options, **changed)
    return options.plain()


def _finished(job: ConversionJob) -> dict[str, Written]:
    """Recorded output files that exist. Files without a record are written again."""
    found: dict[str, Written] = {}
    with contextlib.suppress(FileNotFoundError), open(os.path.join(job.output, DONE), encoding="utf-8") as file:
        for line in file:
            with contextlib.suppress(ValueError, KeyError, TypeError):  # the process was killed while writing this line
                note = json.loads(line)
                written = Written(str(note["output"]), int(note["records"]), int(note["size_bytes"]))
                with contextlib.suppress(FileNotFoundError):
                    if os.stat(os.path.join(job.output, written.output)).st_size == written.size_bytes:
                        found[written.output] = written
    return found


def _note(job: ConversionJob, task: ConversionTask, written: Written) -> None:
    first, last = task.refs[0], task.refs[-1]
    note = {
        "output": written.output,
        "records": written.records,
        "size_bytes": written.size_bytes,
        "inputs": [[first.file, first.begin], [last.file, last.end]],
    }
    with _writing(job.output), open(os.path.join(job.output, DONE), "a", encoding="utf-8") as file:
        file.write("\n" if file.tell() else "")  # the last line may be incomplete
        file.write(json.dumps(note) + "\n")
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: str) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# --- the run ---------------------------------------------------------------------------------------------------------


def _run(
    job: ConversionJob, manifest: Manifest, workers: int, progress: Callable[[ConversionProgress], None]
) -> Converted:
    with _writing(job.output):
        done = _prepare(job, manifest)
    tasks = tasks_of(manifest, job.recipe.file_bytes)
    sizes = {task.output: task.size_bytes for task in tasks}
    found = len(done)

    def report() -> None:
        so_far = sum(sizes.get(name, 0) for name in done)
        progress(ConversionProgress(so_far, sum(sizes.values()), len(done), sum(one.records for one in done.values())))

    report()
    left = [task for task in tasks if task.output not in done]
    for task, written in _work(job, left, workers):
        if written.error:
            so_far = f"{len(done):,} of {counted(len(tasks), 'output file')} finished"
            raise DataError(f"{written.error} ({so_far}; the same command continues)")
        _note(job, task, written)
        done[written.output] = written
        report()
    return _checked(job, manifest, done, found)


def _work(job: ConversionJob, tasks: list[ConversionTask], workers: int) -> Iterator[tuple[ConversionTask, Written]]:
    """Run all tasks; yield each with its result, in order of completion."""
    if workers == 1 or len(tasks) < 2:
        worker = ConversionWorker(job)
        for task in tasks:
            yield task, worker.do(task)
        return
    rest = iter(tasks)
    context = multiprocessing.get_context("spawn")  # a fork would copy the locks held by pyarrow's threads
    with ProcessPoolExecutor(min(workers, len(tasks)), context, _begin, (job,)) as pool:
        running: dict[Future[Written], ConversionTask] = {}
        try:
            while True:
                for task in rest:
                    running[pool.submit(_do, task)] = task
                    if len(running) >= 2 * workers:
                        break
                if not running:
                    return
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    yield running.pop(future), future.result()
        except BrokenProcessPool:
            advice = "Out of memory? Use fewer --workers; the same command continues where it stopped"
            raise DataError(f"a conversion process was killed. {advice}") from None
        finally:
            pool.shutdown(cancel_futures=True)


def _checked(job: ConversionJob, manifest: Manifest, done: dict[str, Written], found: int) -> Converted:
    """Read the footers of all output files. Raises ``DataError`` if they do not match what was written."""
    records = sum(one.records for one in done.values())
    if manifest.records not in (UNKNOWN, records):
        raise DataError(
            f"{job.output}: {records:,} of {manifest.records:,} records were written. Convert again into another folder"
        )
    there = {name for name in os.listdir(job.output) if not name.startswith((".", "_"))}
    if there != set(done):
        strange = sorted(there ^ set(done))[0]
        raise DataError(f"{job.output}: {strange} is unexpected or missing. Convert again into another folder")
    if done:
        written = scan(job.output, "ipc", shard_records=job.recipe.shard_records)
        if written.records != records:
            raise DataError(
                f"{job.output}: contains {written.records:,} records, but {records:,} were written. Convert again"
            )
    return Converted(len(done), records, sum(one.size_bytes for one in done.values()), found)


# --- worker processes ------------------------------------------------------------------------------------------------


class ConversionWorker:
    """Runs tasks, one after another."""

    def __init__(self, job: ConversionJob) -> None:
        self._job = job
        self._reader: Any = None

    def do(self, task: ConversionTask) -> Written:
        """Run a task. Errors that a user can fix are returned, not raised, because they must reach the parent
        process."""
        try:
            return self._write(task)
        except EdlError as error:
            return Written(task.output, error=str(error))
        except OSError as error:
            return Written(task.output, error=_unwritable(self._job.output, error))
        except pa.ArrowException as error:
            return Written(task.output, error=f"{task.refs[0].file} and following: {error}")

    def try_out(self, file: str) -> None:
        """Apply the recipe to an empty table, to find invalid recipes before the folder is created.

        Raises ``DataError`` and ``SettingError``.
        """
        self._job.recipe.applied(self._opened(file).schema(file).empty_table(), file)

    def _write(self, task: ConversionTask) -> Written:
        path = os.path.join(self._job.output, task.output)
        unfinished = os.path.join(self._job.output, f".{task.output}.{os.getpid()}{UNFINISHED}")
        compression = self._job.recipe.compression
        options = ipc.IpcWriteOptions(compression=None if compression == "none" else compression)
        records = 0
        writer = None
        try:
            with pa.OSFile(unfinished, "wb") as sink:
                for batch in self._batches(task):
                    if writer is None:
                        writer = ipc.new_file(sink, batch.schema, options=options)
                    writer.write_batch(batch)
                    records += batch.num_rows
                if writer is not None:
                    writer.close()
            with open(unfinished, "rb+") as file:
                os.fsync(file.fileno())
            size = os.stat(unfinished).st_size
            os.replace(unfinished, path)
            _sync(self._job.output)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(unfinished)
            raise
        return Written(task.output, records, size)

    def _batches(self, task: ConversionTask) -> Iterator[pa.RecordBatch]:
        """All records in batches of equal size, except the last (and see ``whole_batches``); at least one batch, which
        may be empty."""
        size = self._job.recipe.shard_records
        waiting: list[pa.Table] = []
        rows, first = 0, True
        for table in self._tables(task):
            waiting.append(table)
            rows += table.num_rows
            if rows < size:
                continue
            whole = pa.concat_tables(waiting).combine_chunks()
            for begin in range(0, rows - size + 1, size):
                yield from whole_batches(whole.slice(begin, size))
                first = False
            rest = rows % size
            waiting, rows = ([whole.slice(whole.num_rows - rest)] if rest else []), rest
        if waiting and (rows or first):
            yield from whole_batches(pa.concat_tables(waiting))

    def _tables(self, task: ConversionTask) -> Iterator[pa.Table]:
        tables = self._plain_tables(task)
        if self._job.recipe.seed is None:
            yield from tables
            return
        whole = pa.concat_tables(list(tables)).combine_chunks()
        order = Permutation(whole.num_rows, key(self._job.recipe.seed, task.output)).array(0, whole.num_rows)
        yield whole.take(pa.array(order))

    def _plain_tables(self, task: ConversionTask) -> Iterator[pa.Table]:
        recipe = self._job.recipe
        reader = self._opened(task.refs[0].file)
        empty = True
        for ref in task.refs:
            for piece in reader.pieces(ref):
                empty = empty and not piece.num_rows
                yield recipe.applied(piece, ref.file)
        if empty and self._job.format != "user":
            yield recipe.applied(reader.schema(task.refs[0].file).empty_table(), task.refs[0].file)

    def _opened(self, file: str) -> Any:
        if self._reader is None:
            job = self._job
            access: dict[str, Any] = {"storage_options": job.storage_options, "options": job.options}
            columns = job.recipe.needed(None)
            if columns is None and job.recipe.columns is not None and job.format != "user":
                columns = job.recipe.needed(open_reader(job.format, **access).schema(file).names)
            self._reader = open_reader(job.format, columns, **access)
        return self._reader


def whole_batches(table: pa.Table) -> list[pa.RecordBatch]:
    """A table as one batch; as several if a column holds more than 2 GiB of text or bytes, which one array cannot."""
    batches: list[pa.RecordBatch] = table.combine_chunks().to_batches()
    return batches or [pa.RecordBatch.from_pylist([], schema=table.schema)]


_worker: ConversionWorker | None = None


def _begin(job: ConversionJob) -> None:
    """Initialise a child process: it exits when its parent does, and leaves Ctrl-C to the parent."""
    global _worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()
    _worker = ConversionWorker(job)


def _end_with(sentinel: int) -> None:
    connection.wait([sentinel])
    os._exit(1)


def _do(task: ConversionTask) -> Written:
    if _worker is None:
        raise RuntimeError("a task arrived before the job")
    return _worker.do(task)
