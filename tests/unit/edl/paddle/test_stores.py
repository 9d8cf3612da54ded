"""Groups of Paddle's on one store, with a store and groups that show what gloo does with them."""

from __future__ import annotations

import socket
import types
from typing import Any

import pytest

from edl.paddle import stores
from edl.wire.address import address

ENVIRONMENT = {"PADDLE_CURRENT_ENDPOINT": "127.0.0.1:1"}


class Served:
    """What all clients of one server see."""

    def __init__(self) -> None:
        self.kept: dict[str, str] = {}


class Store:
    """A client, as ``core.TCPStore``."""

    servers: dict[int, Served]

    def __init__(self, host: str, port: int, is_master: bool, world_size: int) -> None:
        assert (host, world_size) == ("127.0.0.1", 0)
        if is_master:
            # What Paddle does: it listens although the port is held, because both allow that.
            with socket.socket() as listening:
                listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listening.bind(("", port))
                listening.listen()
            self.servers[port] = Served()
        self._served = self.servers[port]

    def set(self, key: str, value: str) -> None:
        self._served.kept[key] = value

    def get(self, key: str) -> bytes:
        return self._served.kept[key].encode()


class Group:
    """As gloo meets: each sets its address under its rank, whichever group it is, and reads what lies there."""

    @staticmethod
    def create(store: Any, rank: int, world_size: int, group_id: int = 0) -> Any:
        store.set(str(rank), f"address of {rank} in {group_id}")
        return store


def core() -> Any:
    """One worker's ``paddle.base.core``, adapted."""
    made = types.SimpleNamespace(TCPStore=Store, ProcessGroupGloo=type("ProcessGroupGloo", (Group,), {}))
    stores.adapt(made, ENVIRONMENT)
    return made


def test_each_further_group_has_a_store_of_its_own() -> None:
    Store.servers = {1: Served()}
    cores = [core(), core()]
    clients: list[Any] = [Store("127.0.0.1", 1, False, 0) for _ in cores]

    def make(group_id: int) -> list[Any]:
        return [
            one.ProcessGroupGloo.create(client, rank, 2, group_id)
            for rank, (one, client) in enumerate(zip(cores, clients, strict=True))
        ]

    first = make(0)
    assert [one is client for one, client in zip(first, clients, strict=True)] == [True, True], "Paddle's own, as ever"
    second, third, again = make(7), make(8), make(8)
    for group, number in ((second, 7), (third, 8), (again, 8)):
        assert group[0] is not clients[0]
        assert {key: group[0].get(key).decode() for key in ("0", "1")} == {
            "0": f"address of 0 in {number}",
            "1": f"address of 1 in {number}",
        }
    assert len({id(group[0]._served) for group in (first, second, third, again)}) == 4


def test_a_lone_rank_and_an_unknown_address_change_nothing() -> None:
    Store.servers = {1: Served()}
    client: Any = Store("127.0.0.1", 1, False, 0)
    one = core()
    for _ in range(2):
        assert one.ProcessGroupGloo.create(client, 0, 1, 9) is client
    nowhere = types.SimpleNamespace(TCPStore=Store, ProcessGroupGloo=type("ProcessGroupGloo", (Group,), {}))
    stores.adapt(nowhere, {})
    for _ in range(2):
        assert nowhere.ProcessGroupGloo.create(client, 0, 2, 9) is client


def test_adapting_twice_and_other_versions_of_paddle() -> None:
    one = core()
    create = one.ProcessGroupGloo.create
    stores.adapt(one, ENVIRONMENT)
    assert one.ProcessGroupGloo.create is create
    empty = types.SimpleNamespace()
    stores.adapt(empty, ENVIRONMENT)
    assert vars(empty) == {}


@pytest.mark.parametrize("host", ["::1", "10.0.0.1", "name"])
def test_the_store_is_waited_for_at_its_address(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[tuple[str, int]] = []
    monkeypatch.setattr(stores, "wait_until_open", waited.append)
    made = types.SimpleNamespace(create_or_get_global_tcp_store=lambda: "the store")
    stores.adapt(made, {"PADDLE_MASTER": address(host, 6170), "PADDLE_TRAINER_ID": "1"})
    assert made.create_or_get_global_tcp_store() == "the store" and waited == [(host, 6170)]
