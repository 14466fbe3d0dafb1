"""One transport with its pool on a GPU, in a process of its own: `python -m tests.transfer.gpu_child BACKEND NBYTES`.

Obeys lines: `connect ENDPOINT`, `fill SEED`, `sum` (of the pool, weighted by place), `write`: all of it to the peer.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from pd.transfer.choose import make_transport
from pd.transfer.transport import JobDone, Span, Transport
from tests.transfer.kit import wait_jobs


def pool_on_gpu(backend: str, me: str, nbytes: int) -> tuple[Transport, Tensor]:
    transport = make_transport(backend, me=me, host="127.0.0.1")
    pool = torch.zeros(nbytes, dtype=torch.uint8, device="cuda")
    transport.register(pool.data_ptr(), nbytes, device=0)
    return transport, pool


def fill(pool: Tensor, seed: int) -> None:
    dice = torch.Generator().manual_seed(seed)
    pool.copy_(torch.randint(0, 256, (len(pool),), dtype=torch.uint8, generator=dice))
    torch.cuda.synchronize()


def main() -> None:
    backend, nbytes = sys.argv[1], int(sys.argv[2])
    transport, pool = pool_on_gpu(backend, "b", nbytes)
    say(transport.endpoint().hex())
    for line in sys.stdin:
        match line.split():
            case ["connect", endpoint]:
                transport.connect("a", bytes.fromhex(endpoint))
                say("connected")
            case ["fill", seed]:
                fill(pool, int(seed))
                say("filled")
            case ["has", seed]:
                other = torch.empty_like(pool)
                fill(other, int(seed))
                say(str(bool(torch.equal(pool, other))))
            case ["write"]:
                transport.write("a", [Span(0, 0, nbytes)], job=1)
                say(str([type(end) for end in wait_jobs(transport, 1)] == [JobDone]))
    transport.close()


def say(answer: str) -> None:
    print(answer, flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
