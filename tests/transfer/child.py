"""One transport in a process of its own, obeying JSON lines: `python -m tests.transfer.child BACKEND ME NBYTES`."""

from __future__ import annotations

import hashlib
import json
import sys

from pd.transfer.transport import Span, TransferError
from tests.transfer.kit import Net, wait_jobs


def main() -> None:
    backend, me, nbytes = sys.argv[1:]
    net = Net(backend)
    transport, view = net.make(me, int(nbytes))
    say(transport.endpoint().hex())
    for line in sys.stdin:
        match json.loads(line):
            case ["connect", peer, endpoint]:
                transport.connect(peer, bytes.fromhex(endpoint))
                say(None)
            case ["fill", byte]:
                view[:] = bytes([byte]) * len(view)
                say(None)
            case ["digest"]:
                say(hashlib.sha256(view).hexdigest())
            case ["write", peer, src, dst, count]:
                try:
                    transport.write(peer, [Span(src, dst, count)], job=1)
                except TransferError:
                    say(["TransferError"])
                else:
                    say([type(end).__name__ for end in wait_jobs(transport, 1)])
            case ["begin", peer, count, num_jobs]:
                for job in range(num_jobs):
                    transport.write(peer, [Span(0, 0, count)], job=job)
                say(None)
            case ["sever", peer]:
                say(transport.sever(peer))
    net.close()


def say(answer: object) -> None:
    print(json.dumps(answer), flush=True)  # noqa: T201


main()
