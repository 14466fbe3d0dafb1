"""Which backend a name means. The one place that imports them, and only the one that is asked for."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping

from pd.transfer.address import refuse_rdma, refuse_unknown
from pd.transfer.host import rdma_devices
from pd.transfer.library_transport import LibraryTransport
from pd.transfer.outbox import Outbox
from pd.transfer.transport import TransferError, Transport

NAMES = ("auto", "shm", "tcp", "nixl", "mooncake")


def make_transport(
    name: str,
    *,
    me: str,
    host: str,
    devices: tuple[str, ...] = (),
    params: Mapping[str, str] | None = None,
    key: bytes | None = None,
) -> Transport:
    """`me` is unique to this process's life; `host` and `devices` are where peers reach it.

    `key`: both ends of a tcp connection prove that they hold it. shm has the kernel's permissions instead, and the
    libraries of nixl and mooncake have nothing of the kind.

    Raises TransferError for an unknown name, for devices or parameters that the backend cannot honour, and for a
    library that is not here.
    """
    given = dict(params or {})
    match name:
        case "nixl":
            from pd.transfer.nixl import nixl_transport

            refuse_unknown(devices, backend=name)
            return nixl_transport(me=me, backend=given.pop("backend", "UCX"), params=given, devices=devices)
        case "mooncake":
            from pd.transfer.mooncake import mooncake_transport

            protocol = given.pop("protocol", "tcp")
            refuse_params(name, given)
            return mooncake_transport(me=me, host=host, protocol=protocol, devices=devices)
        case "auto":
            from pd.transfer.auto import AutoTransport

            refuse_params(name, given)
            refuse_rdma(devices, backend="auto")
            library, without = _at_hand(me, host, devices, key)
            return AutoTransport(me=me, host=host, devices=devices, key=key, library=library, without=without)
        case "tcp":
            from pd.transfer.tcp import TcpTransport

            refuse_params(name, given)
            return TcpTransport(me=me, host=host, devices=devices, key=key)
        case "shm":
            from pd.transfer.shm import ShmTransport

            refuse_params(name, given)
            if devices:
                raise TransferError(
                    f"shm uses no network devices, so it cannot honour {', '.join(devices)}",
                    hint="leave out --transfer-devices, or --transfer tcp (a network interface) or nixl (any)",
                )
            return ShmTransport(me=me)
    raise TransferError(f"no transfer backend is called {name!r}; there are {', '.join(NAMES)}")


def refuse_params(name: str, params: Mapping[str, str]) -> None:
    """Raises TransferError if there are any: this backend has none."""
    if params:
        told = ", ".join(f"{key}={value}" for key, value in params.items())
        raise TransferError(f"{name} has no parameter {told}", hint="parameters are for --transfer nixl and mooncake")


def _at_hand(
    me: str, host: str, devices: tuple[str, ...], key: bytes | None
) -> tuple[Callable[[Outbox], LibraryTransport] | None, str]:
    """The library that `auto` lets compete with tcp, or why there is none. Without RDMA tcp is the faster."""
    if devices:
        return None, "no library tried, as the devices given are tcp's"
    if key is not None:
        return None, "no library tried, as none can prove the cluster's key"
    if not (names := rdma_devices()):
        return None, "no library tried, as this host has no RDMA device"
    if importlib.util.find_spec("nixl") is not None:
        from pd.transfer.nixl import nixl_transport

        return (lambda outbox: nixl_transport(me=me, outbox=outbox)), ""
    if importlib.util.find_spec("mooncake") is not None:
        from pd.transfer.mooncake import mooncake_transport

        return (lambda outbox: mooncake_transport(me=me, host=host, protocol="rdma", outbox=outbox)), ""
    return None, f"neither nixl nor mooncake is installed, which would use {', '.join(names)}"
