"""TLS over a wire, for clusters with an untrusted network: one certificate for the whole job.

OpenSSL works on memory buffers under a lock, and the bytes go over the plain wire. So the plain wire's deadlines apply,
and one thread may read while another writes, which a socket of the ``ssl`` module does not allow.
"""

from __future__ import annotations

import logging
import ssl
import threading
from collections.abc import Sequence

from edl.errors import SettingError
from edl.file_backed import FileBacked
from ps.errors import DamagedFrame, HungUp
from ps.net.connection import Wire

log = logging.getLogger(__name__)

TlsFiles = FileBacked[tuple[ssl.SSLContext, ssl.SSLContext]]
"""Contexts for the calling and the serving side."""

_RECORDS_BYTES = 256 * 1024


def contexts(certificate: str, key: str, authority: str) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Contexts for the calling and the serving side, from PEM files. Both present the certificate and accept any that
    the authority has signed, for any host name, because pservers may run anywhere. Raises ``SettingError``."""
    made = []
    for purpose in (ssl.PROTOCOL_TLS_CLIENT, ssl.PROTOCOL_TLS_SERVER):
        context = ssl.SSLContext(purpose)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        try:
            context.load_cert_chain(certificate, key)
            context.load_verify_locations(authority)
        except (OSError, ssl.SSLError) as error:
            files = f"{certificate}, {key}, {authority}"
            raise SettingError("TLS files", files, f"cannot be used: {error}") from None
        made.append(context)
    return made[0], made[1]


def watched(certificate: str, key: str, authority: str) -> TlsFiles:
    """The contexts of both sides, made anew when the PEM files change: the ones before would go on to trust an
    authority that has been removed. Raises ``SettingError``."""
    files = (certificate, key, authority)
    return FileBacked(
        "the TLS files", files, lambda: contexts(*files), lambda text: log.warning("Parameter server: %s", text)
    )


def calling_over(plain: Wire, context: ssl.SSLContext | None, until_s: float) -> Wire:
    """The wire for the calling side; plain without a context."""
    return plain if context is None else TlsSocket(plain, context, False, until_s)


def called_over(plain: Wire, context: ssl.SSLContext | None, until_s: float) -> Wire:
    """The wire for the serving side; plain without a context or for unix sockets."""
    return plain if context is None or not plain.checked else TlsSocket(plain, context, True, until_s)


class TlsSocket:
    """A ``Wire`` with TLS."""

    checked = False

    def __init__(self, plain: Wire, context: ssl.SSLContext, called: bool, until_s: float) -> None:
        """Perform the handshake. Raises ``DamagedFrame`` if the peer has no valid certificate or does not use TLS."""
        self._plain = plain
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._object = context.wrap_bio(self._incoming, self._outgoing, server_side=called)
        self._lock = threading.Lock()
        self._sending = threading.Lock()
        self._buffer = memoryview(bytearray(_RECORDS_BYTES))
        while True:
            try:
                self._object.do_handshake()
                self._flush(until_s)
                return
            except ssl.SSLWantReadError:
                self._flush(until_s)
                self._receive(until_s)
            except ssl.SSLError as error:
                self._flush(until_s)
                raise DamagedFrame(f"TLS handshake failed: {error.reason or error}") from None

    def read_into(self, view: memoryview, least: int, until_s: float) -> int:
        """Read at least ``least`` bytes, at most as many as fit."""
        done = 0
        while done < least:
            try:
                with self._lock:
                    count = self._object.read(len(view) - done, view[done:])
            except ssl.SSLWantReadError:
                # What TLS itself owes, such as the answer to a change of keys. A writer sends it as well, and must not
                # be waited for: it may wait for the peer, which waits for this reader.
                if self._sending.acquire(blocking=False):
                    try:
                        self._send(until_s)
                    finally:
                        self._sending.release()
                self._receive(until_s)
                continue
            except ssl.SSLError as error:
                raise _broken(error) from None
            if not count:
                raise HungUp("the peer closed the connection")
            done += int(count)
        return done

    def write(self, parts: Sequence[memoryview], until_s: float, file: int = -1) -> None:
        """Write all parts in order. TLS cannot pass a file descriptor along."""
        for part in parts:
            for begin in range(0, len(part), _RECORDS_BYTES):
                with self._sending:
                    try:
                        with self._lock:
                            self._object.write(part[begin : begin + _RECORDS_BYTES])
                    except ssl.SSLError as error:
                        raise _broken(error) from None
                    self._send(until_s)

    def pending(self) -> bool:
        """True if data can be read without waiting."""
        with self._lock:
            waiting = self._object.pending() or self._incoming.pending
        return bool(waiting) or self._plain.pending()

    def hung_up(self) -> bool:
        """True if the peer is known to have closed; unread data may remain."""
        return self._plain.hung_up()

    def shut(self) -> None:
        """Shut down both directions, which wakes up blocked calls."""
        self._plain.shut()

    def close(self) -> None:
        """Close the socket, once no thread uses it."""
        self._plain.close()

    def _receive(self, until_s: float) -> None:
        count = self._plain.read_into(self._buffer, 1, until_s)
        with self._lock:
            self._incoming.write(self._buffer[:count])

    def _flush(self, until_s: float) -> None:
        with self._sending:
            self._send(until_s)

    def _send(self, until_s: float) -> None:
        """Send OpenSSL's pending output; the caller holds ``_sending``, so that it is sent in order."""
        with self._lock:
            data = self._outgoing.read()
        if data:
            self._plain.write([memoryview(data)], until_s)


def _broken(error: ssl.SSLError) -> HungUp | DamagedFrame:
    if isinstance(error, ssl.SSLZeroReturnError | ssl.SSLEOFError):
        return HungUp("the peer closed the connection")
    return DamagedFrame(f"TLS: {error.reason or error}")
