"""One connection of the tcp backend: when the kernel wakes its reader, and what a system call is offered."""

from __future__ import annotations

import select
import socket
from collections.abc import Iterator

import pytest

from pd.transfer.region import Region
from pd.transfer.tcp_ends import HostEnds
from pd.transfer.tcp_link import Link

AWAITED = 512 << 10


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, Link]]:
    """A peer that writes, and the link that reads it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        theirs = socket.create_connection(server.getsockname())
        ours, _ = server.accept()
    region = Region.anonymous(2 << 20)
    link = Link(ours, HostEnds(region), is_connecting=False, checks_reset=True)
    yield theirs, link
    link.close()
    theirs.close()
    region.close()


def is_readable(link: Link, timeout_s: float) -> bool:
    link.await_much()
    return bool(select.select([link.sock], [], [], timeout_s)[0])


def test_a_long_message_wakes_its_reader_for_much_at_once_and_for_its_end(ends: tuple[socket.socket, Link]) -> None:
    theirs, link = ends
    message = bytes(range(256)) * 4096 + b"the end"  # a MiB and a little
    received = bytearray(len(message))
    ended = []
    link.expect([memoryview(received)], lambda: (ended.append(True), link.expect([memoryview(bytearray(4))], int)))
    assert not is_readable(link, 0.0)
    theirs.sendall(message[:10_000])
    assert not is_readable(link, 0.05), "it would be woken for each segment"
    theirs.sendall(message[10_000:AWAITED])
    assert is_readable(link, 10.0)
    assert take(link, AWAITED) == AWAITED
    theirs.sendall(message[AWAITED:-7])
    assert is_readable(link, 10.0)
    take(link, len(message) - AWAITED - 7)
    assert not is_readable(link, 0.05) and not ended
    theirs.sendall(message[-7:])
    assert is_readable(link, 10.0), "what is missing is less than is awaited else"
    take(link, 7)
    assert ended and received == message
    theirs.sendall(b"abcd")
    assert is_readable(link, 10.0), "a short message is told of at once"


def test_the_end_of_a_connection_is_told_of_in_the_midst_of_a_message(ends: tuple[socket.socket, Link]) -> None:
    theirs, link = ends
    link.expect([memoryview(bytearray(2 << 20))], int)
    theirs.sendall(bytes(1000))
    theirs.close()
    assert is_readable(link, 10.0)
    with pytest.raises(ConnectionResetError, match="the other end closed the connection"):
        take(link, 1001)


def take(link: Link, nbytes: int) -> int:
    """Until so many bytes have come in."""
    total = 0
    while total < nbytes:
        assert is_readable(link, 10.0)
        total += link.receive()
    return total
