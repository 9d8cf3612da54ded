"""A lease is renewed from a thread where the system allows no further threads for a while."""

from __future__ import annotations

import threading
from typing import Any

import grpc
import pytest
from pyetcd.etcdrpc import rpc_pb2, rpc_pb2_grpc

from edl.adapters.etcd_lease import EtcdLeases


class Channel:
    def close(self) -> None:
        raise AssertionError("gRPC would wait for ever for the call that has no thread")


class Service:
    """Answers once gRPC can start its threads."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.refused = True
        self.opened: list[Channel] = []
        monkeypatch.setattr(grpc, "insecure_channel", self._open)
        monkeypatch.setattr(rpc_pb2_grpc, "LeaseStub", lambda channel: self)

    def _open(self, address: str, options: Any) -> Channel:
        self.opened.append(Channel())
        return self.opened[-1]

    def LeaseKeepAlive(self, requests: Any, **_: Any) -> list[Any]:
        if self.refused:
            raise RuntimeError("can't start new thread")
        return [rpc_pb2.LeaseKeepAliveResponse(TTL=3)]


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Service:
    return Service(monkeypatch)


def test_nothing_is_called_without_the_threads_for_it(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    assert not EtcdLeases(["localhost:1"], 1.0).renew(1)
    assert not service.opened


def test_a_channel_that_gets_no_thread_is_replaced_and_never_closed(service: Service) -> None:
    leases = EtcdLeases(["localhost:1"], 1.0)
    assert not leases.renew(1)
    leases.close()
    service.refused = False
    assert leases.renew(1)
    assert len(service.opened) == 2
