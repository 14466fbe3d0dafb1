"""What the HTTP front needs of the router behind it. Pure: the contract between front/ and roles/router."""

from __future__ import annotations

from typing import Protocol

from pd.runtime.core.events import Emit, End, Submit
from pd.runtime.wire.values import ModelCard, Role


class Stream(Protocol):
    """One request's way back to its client. Bounded: a client that does not read is cancelled by the router."""

    async def next(self) -> Emit | End:
        """Wait for what comes next. After an Emit with `finish`, or an End, nothing follows."""


class Door(Protocol):
    """The router as the front sees it. All calls from the one asyncio loop; none blocks."""

    def submit(self, request: Submit) -> Stream: ...

    def abandon(self, request_id: str, reason: str, *, ending: str = "abandoned") -> None:
        """The client left; or has all it wanted, which is another `ending`. Harmless for a request that has ended."""

    def missing(self) -> tuple[Role, ...]:
        """Roles without a living instance that keep this cluster from serving; empty when it can serve."""

    def why_none_meet(self) -> str | None:
        """Why no two of the living instances can serve together, as far as is known; None: some may."""

    def card(self) -> ModelCard | None:
        """The model served and its limits (the smallest among living instances); None before the first Hello."""

    def state(self) -> dict[str, object]:
        """JSON-able: instances, their load and epochs, requests by state. For GET /state."""
