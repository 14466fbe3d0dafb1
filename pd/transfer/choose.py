"""Which backend a name means. The one place that imports them, and only the one that is asked for."""

from __future__ import annotations

from pd.transfer.transport import TransferError, Transport

NAMES = ("auto", "shm", "tcp")


def make_transport(name: str, *, me: str, host: str, devices: tuple[str, ...] = ()) -> Transport:
    """`me` is unique to this process's life; `host` and `devices` are where TCP listens.

    Raises TransferError for an unknown name, and for devices that the backend cannot honour.
    """
    if name == "auto":
        from pd.transfer.auto import AutoTransport

        return AutoTransport(me=me, host=host, devices=devices)
    if name == "tcp":
        from pd.transfer.tcp import TcpTransport

        return TcpTransport(me=me, host=host, devices=devices)
    if name == "shm":
        from pd.transfer.shm import ShmTransport

        if devices:
            raise TransferError(f"shm uses no network devices, so it cannot honour {', '.join(devices)}")
        return ShmTransport(me=me)
    raise TransferError(f"no transfer backend is called {name!r}; there are {', '.join(NAMES)}")
