"""pd's own transports, through the door that ranks use."""

from __future__ import annotations

import time

from pd.doctor.measure.ends import WRITE_S, MeasureError
from pd.doctor.readable import readable
from pd.transfer.choose import make_transport
from pd.transfer.transport import JobDone, Span, Transport

OTHER = "other"


class PdEnd:
    def __init__(self, transport: Transport, nbytes: int) -> None:
        self._transport = transport
        self.region = transport.allocate(nbytes)
        self._job = 0

    def address(self) -> bytes:
        return self._transport.endpoint()

    def meet(self, address: bytes) -> None:
        self._transport.connect(OTHER, address)

    def write(self, nbytes: int) -> float:
        self._job += 1
        began = time.perf_counter()
        self._transport.write(OTHER, [Span(0, 0, nbytes)], job=self._job)
        while time.perf_counter() - began < WRITE_S:
            readable(self._transport.wake_fd, timeout_s=WRITE_S)
            for ended in self._transport.poll():
                if isinstance(ended, JobDone):
                    return time.perf_counter() - began
                raise MeasureError(ended.reason)
        raise MeasureError(f"{nbytes} bytes did not arrive in {WRITE_S:.0f} s")

    def tend(self) -> None:
        for ended in self._transport.poll():
            if not isinstance(ended, JobDone):
                raise MeasureError(ended.reason)

    def close(self) -> None:
        self.region.release()
        self._transport.close()


def make(backend: str, *, name: str, host: str, nbytes: int) -> PdEnd:
    return PdEnd(make_transport(backend, me=name, host=host, devices=()), nbytes)
