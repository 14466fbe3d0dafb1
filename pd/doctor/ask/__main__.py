"""`python -m pd.doctor.ask FD`: forks a process for each question that comes through the socket FD.

Rules
1. This process loads no library that is asked: each question begins with the same clean interpreter.
2. A question is answered by a grandchild; the child between reports what became of it, whatever that is.
3. All end with who asks: this process when the socket closes, the others by the kernel.
"""

from __future__ import annotations

import importlib
import os
import signal
import socket
import sys
import traceback

import msgspec

from pd.doctor.asking import MISSING, Reply
from pd.runtime.roles.process import die_with

_LONGEST = 1 << 16
"""Bytes of a question."""
_LAST_WORDS = 4096
"""Bytes of standard error that are passed on."""


def main() -> None:
    door = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps
    me = os.getpid()
    while True:
        question, fds, *_ = socket.recv_fds(door, _LONGEST, 1)
        if not question:
            return
        if os.fork() == 0:
            door.close()
            _supervise(msgspec.json.decode(question, type=list[str]), socket.socket(fileno=fds[0]), parent=me)
        for fd in fds:
            os.close(fd)


def _supervise(question: list[str], reply: socket.socket, *, parent: int) -> None:
    """Never returns."""
    die_with(parent)
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    me = os.getpid()
    reply.sendall(me.to_bytes(4, "little"))
    out, err = os.memfd_create("answer"), os.memfd_create("words")
    child = os.fork()
    if child == 0:
        die_with(me)
        reply.close()
        os.dup2(out, 1)
        os.dup2(err, 2)
        code = _answer(*question)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # some libraries (Debian's ibverbs-providers under UCX) crash on the way out
    _, status = os.waitpid(child, 0)
    words = _content(err)[-_LAST_WORDS:].decode(errors="replace")
    reply.sendall(msgspec.msgpack.encode(Reply(os.waitstatus_to_exitcode(status), _content(out), words)))
    os._exit(0)


def _answer(name: str, *arguments: str) -> int:
    """0: answered. MISSING: not installed. 1: raised; the last line of standard error says what."""
    answer_to = os.dup(1)
    os.dup2(2, 1)  # libraries greet on standard output
    try:
        answer = importlib.import_module(f"pd.doctor.ask.{name}").answer(*arguments)
    except ModuleNotFoundError as error:
        sys.stderr.write(f"No module named {error.name}\n")
        return MISSING
    except BaseException:  # noqa: BLE001  the outermost of this process
        traceback.print_exc()
        return 1
    with os.fdopen(answer_to, "wb") as pipe:
        pipe.write(msgspec.json.encode(answer))
    return 0


def _content(fd: int) -> bytes:
    return os.pread(fd, os.fstat(fd).st_size, 0)


if __name__ == "__main__":
    main()
