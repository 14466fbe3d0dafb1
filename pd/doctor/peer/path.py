"""What lies between two hosts: the interface under an address, and datagrams that may not be cut."""

from __future__ import annotations

import fcntl
import socket
import struct
from collections.abc import Iterable

SIOCGIFADDR, SIOCGIFMTU = 0x8915, 0x8921
IP_MTU_DISCOVER, IP_PMTUDISC_PROBE = 10, 3
IPV6_MTU_DISCOVER, IPV6_PMTUDISC_PROBE = 23, 3
"""<linux/in.h>, <linux/in6.h>: set "don't fragment" and send whatever the interface takes."""
HEADERS = {socket.AF_INET: 28, socket.AF_INET6: 48}
"""Bytes of IP and UDP headers."""
LARGEST = 65535
"""Bytes of an IP packet; the loopback interface's MTU is one more."""
TRIES = 3
"""Of each size: a datagram may be lost for other reasons."""


def mtu_of(address: str) -> int | None:
    """MTU of the interface that holds this IPv4 address. None: unknown."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                held = socket.inet_ntoa(fcntl.ioctl(sock, SIOCGIFADDR, request)[20:24])
                if held == address:
                    return int(struct.unpack("i", fcntl.ioctl(sock, SIOCGIFMTU, request)[16:20])[0])
            except OSError:
                continue  # an interface without an address
    return None


def interface_of(address: str) -> str | None:
    """Name of the interface that holds this IPv4 address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            try:
                held = fcntl.ioctl(sock, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))[20:24]
            except OSError:
                continue
            if socket.inet_ntoa(held) == address:
                return name
    return None


def send_whole(family: int, host: str, port: int, sizes: Iterable[int]) -> None:
    """Send datagrams of `sizes` bytes, headers included, that no router may cut. One too large for the interface
    is left."""
    with socket.socket(family, socket.SOCK_DGRAM) as sock:
        if family == socket.AF_INET:
            sock.setsockopt(socket.IPPROTO_IP, IP_MTU_DISCOVER, IP_PMTUDISC_PROBE)
        else:
            sock.setsockopt(socket.IPPROTO_IPV6, IPV6_MTU_DISCOVER, IPV6_PMTUDISC_PROBE)
        for size in sizes:
            for _ in range(TRIES):
                try:
                    sock.sendto(bytes(size - HEADERS[socket.AddressFamily(family)]), (host, port))
                except OSError:
                    break  # larger than the interface takes, or unreachable: it will not be counted


def count_whole(sock: socket.socket, *, wait_s: float) -> set[int]:
    """Sizes, headers included, that arrive until nothing came for `wait_s`."""
    sock.settimeout(wait_s)
    found: set[int] = set()
    try:
        while len(found) < 64:
            found.add(len(sock.recv(65536)) + HEADERS[socket.AddressFamily(sock.family)])
    except TimeoutError:
        return found
    return found
