"""Receivers of notifications on loopback: a web server, a mail server and a program."""

from __future__ import annotations

import email
import email.policy
import http.server
import json
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class WebhookSink:
    """A web server that keeps what is posted to it. ``statuses``: of the next answers; then 204."""

    def __init__(self) -> None:
        """The names of headers are in lower case."""
        self.posts: list[tuple[dict[str, str], bytes]] = []
        self.statuses: list[int] = []
        self.gets: list[str] = []
        """Paths that were read."""
        self.url = ""

    @property
    def documents(self) -> list[dict[str, Any]]:
        return [json.loads(body) for _, body in self.posts]

    def answer(self, headers: dict[str, str], body: bytes) -> int:
        status = self.statuses.pop(0) if self.statuses else 204
        if status < 300:
            self.posts.append((headers, body))
        return status


@contextmanager
def webhook_sink() -> Iterator[WebhookSink]:
    sink = WebhookSink()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(sink.answer({key.lower(): text for key, text in self.headers.items()}, body))
            self.send_header("Location", "/elsewhere")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def do_GET(self) -> None:
            sink.gets.append(self.path)
            self.send_response(204)
            self.end_headers()

        def log_message(self, format: str, *arguments: object) -> None:
            """Stay silent."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        sink.url = f"http://127.0.0.1:{server.server_port}"
        with serving(server):
            yield sink


class MailSink:
    """A mail server that keeps what it gets. ``refuses``: its answer to recipients, empty: it accepts them. ``bye``:
    its answer at the end."""

    def __init__(self) -> None:
        self.messages: list[Any] = []
        self.recipients: list[list[str]] = []
        self.refuses = ""
        self.bye = "221 bye"
        self.silent = threading.Event()
        """While set, it accepts connections and says nothing until it is cleared."""
        self.place = ""

    @property
    def subjects(self) -> list[str]:
        return [message["Subject"] for message in self.messages]


@contextmanager
def mail_sink() -> Iterator[MailSink]:
    sink = MailSink()
    over = threading.Event()

    class Handler(socketserver.StreamRequestHandler):
        def say(self, line: str) -> None:
            self.wfile.write(line.encode() + b"\r\n")

        def handle(self) -> None:
            while sink.silent.is_set() and not over.wait(0.01):
                pass
            self.say("220 sink")
            recipients: list[str] = []
            while line := self.rfile.readline().decode().strip():
                word = line.split(maxsplit=1)[0].upper()
                if word == "EHLO":
                    self.say("250 sink")
                elif word == "RCPT" and sink.refuses:
                    self.say(sink.refuses)
                elif word == "RCPT":
                    recipients.append(line.partition(":")[2].split(">")[0].strip("< "))
                    self.say("250 ok")
                elif word == "DATA":
                    self.say("354 go")
                    sink.recipients.append(recipients)
                    sink.messages.append(email.message_from_bytes(self.text(), policy=email.policy.default))
                    self.say("250 taken")
                elif word == "QUIT":
                    self.say(sink.bye)
                    return
                else:
                    self.say("250 ok")

        def text(self) -> bytes:
            lines = []
            while (line := self.rfile.readline()).rstrip(b"\r\n") != b".":
                lines.append(line)
            return b"".join(lines)

    with _Server(("127.0.0.1", 0), Handler) as server:
        sink.place = f"127.0.0.1:{server.server_address[1]}"
        try:
            with serving(server):
                yield sink
        finally:
            over.set()


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    allow_reuse_address = True


@contextmanager
def serving(server: socketserver.BaseServer) -> Iterator[None]:
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        thread.join()


class ProgramSink:
    """A program that appends its standard input to a file."""

    def __init__(self, folder: Path) -> None:
        self._taken = folder / "taken.jsonl"
        self.path = folder / "notify.sh"
        self.path.write_text(f"#!/bin/sh\ncat >> {self._taken}\n")
        self.path.chmod(0o755)

    @property
    def documents(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self._taken.read_text().splitlines()] if self._taken.exists() else []
