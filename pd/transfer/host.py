"""Which host and which life of a process a peer is, told so that a reused process id deceives nobody."""

from __future__ import annotations

import os
import select
from pathlib import Path

import msgspec

from pd.transfer.transport import TransferError


class Life(msgspec.Struct, frozen=True, array_like=True):
    """One life of one process on one running kernel."""

    boot_id: str
    pid_namespace: str
    pid: int
    started: int  # clock ticks after boot; with the pid, never the same twice


def this_life() -> Life:
    """Raises TransferError where the kernel does not tell (no /proc)."""
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = str(Path("/proc/self/ns/pid").readlink())
        return Life(boot_id, namespace, os.getpid(), _started(os.getpid()))
    except OSError as error:
        raise TransferError(f"cannot tell this process's identity: {error}") from error


def why_elsewhere(theirs: Life, ours: Life) -> str | None:
    """Why `theirs` cannot be seen from here by its pid; None where it can."""
    if theirs.boot_id != ours.boot_id:
        return f"on another host (boot {theirs.boot_id}, ours {ours.boot_id})"
    if theirs.pid_namespace != ours.pid_namespace:
        return f"in another container ({theirs.pid_namespace}, ours {ours.pid_namespace})"
    return None


def is_dead(theirs: Life, ours: Life) -> bool:
    """Proven: no thread of that life runs any more. False also where that cannot be seen from here."""
    if why_elsewhere(theirs, ours) is not None:
        return False
    try:
        pidfd = watch(theirs)
    except OSError:  # out of descriptors: nothing is proven
        return False
    if pidfd is None:
        return True
    try:
        return has_ended(pidfd)
    finally:
        os.close(pidfd)


def watch(life: Life) -> int | None:
    """A pidfd of that life, for the caller to close; None if it is over. Readable once its last thread ended.

    Raises OSError where the kernel gives no descriptor.
    """
    try:
        pidfd = os.pidfd_open(life.pid)
    except (ProcessLookupError, OverflowError):  # a peer may say any number: more than a pid can be is nobody
        return None
    try:
        if _started(life.pid) == life.started:
            return pidfd
    except (FileNotFoundError, ProcessLookupError):
        pass  # it ended and was reaped meanwhile
    except OSError:
        os.close(pidfd)
        raise
    os.close(pidfd)
    return None


def rdma_devices() -> list[str]:
    """Names of this host's."""
    try:
        return sorted(os.listdir("/sys/class/infiniband"))
    except OSError:
        return []


def has_ended(pidfd: int) -> bool:
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    return bool(poller.poll(0))


def _started(pid: int) -> int:
    """Field 22 of proc(5)'s stat; the command before it may hold spaces and brackets."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
