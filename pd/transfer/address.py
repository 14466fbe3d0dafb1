"""The numeric address that a backend listens on and tells its peers, from a host name or a network interface."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct

from pd.transfer.host import rdma_devices
from pd.transfer.transport import TransferError

_SIOCGIFADDR = 0x8915


def numeric_address(host: str, devices: tuple[str, ...], *, backend: str) -> str:
    """Of the one interface in `devices`, else of `host`. Raises TransferError where peers could not use it."""
    refuse_rdma(devices, backend=backend)
    if len(devices) > 1:
        raise TransferError(
            f"{backend} listens on one network interface, not on {', '.join(devices)}", hint="name one of them"
        )
    if devices:
        return _address_of(devices[0])
    try:
        found = str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise TransferError(f"cannot resolve the host {host!r} to listen on: {error}") from error
    if ipaddress.ip_address(found).is_unspecified:
        raise TransferError(
            f"peers cannot reach {found}: give the address or the network interface that they reach this host by"
        )
    return found


def refuse_rdma(devices: tuple[str, ...], *, backend: str) -> None:
    """Raises TransferError, saying what takes them, if some of these are RDMA devices of this host. One may have the
    name of its interface, which is then meant."""
    known = set(rdma_devices()) - set(_interfaces())
    if not (found := [device for device in devices if device.partition(":")[0] in known]):
        return
    names = dict.fromkeys(device.partition(":")[0] for device in found)
    ports = ",".join(device if ":" in device else f"{device}:1" for device in found)
    raise TransferError(
        f"{backend} moves KV over a network interface, and RDMA devices are not: {', '.join(found)}",
        hint=f"what takes them: --transfer nixl --transfer-devices {ports}, or --transfer mooncake "
        f"--transfer-param protocol=rdma --transfer-devices {','.join(names)}",
    )


def refuse_unknown(devices: tuple[str, ...], *, backend: str) -> None:
    """Raises TransferError if some of these are none that UCX has on this host, an interface or an RDMA device's port:
    it would take the others, and warn."""
    interfaces, rdma = _interfaces(), rdma_devices()

    def is_known(device: str) -> bool:
        name, _, port = device.partition(":")
        return device in interfaces or (name in rdma and port.isdecimal())

    if unknown := [device for device in devices if not is_known(device)]:
        raise TransferError(
            f"{backend}: this host has no network device {', '.join(unknown)}",
            hint=f"it has {', '.join(sorted([*interfaces, *(f'{device}:1' for device in rdma)]))}",
        )


def _interfaces() -> list[str]:
    return [name for _, name in socket.if_nameindex()]


def _address_of(device: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            answer = fcntl.ioctl(sock, _SIOCGIFADDR, struct.pack("256s", device.encode()[:15]))
        except OSError as error:
            hint = f"interfaces here: {', '.join(_interfaces())}; "
            hint += f"RDMA devices, which nixl and mooncake take: {', '.join(rdma_devices()) or 'none'}"
            raise TransferError(f"network interface {device} has no IPv4 address: {error}", hint=hint) from error
    return socket.inet_ntoa(answer[20:24])
