"""What is said to a client whose request cannot be answered, in OpenAI's JSON form. Pure."""

from __future__ import annotations

import math

import msgspec

from pd.runtime.core.events import End


class RequestError(Exception):
    """The answer to a request is an HTTP error: 4xx, the client's to mend, or 429 and 503, to be tried again."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        code: str | None = None,
        param: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        """`code` is a word programs may test (OpenAI's where it has one), `param` the field at fault."""
        super().__init__(message)
        self.message = message
        self.status = status
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s

    def error(self) -> dict[str, object]:
        """The object under "error"."""
        return {
            "message": self.message,
            "type": error_type(self.status),
            "param": self.param,
            "code": self.code,
        }

    def body(self) -> bytes:
        return msgspec.json.encode({"error": self.error()})

    def headers(self) -> tuple[tuple[bytes, bytes], ...]:
        """Retry-After in whole seconds, never 0: a client that takes it literally must not spin."""
        if self.retry_after_s is None:
            return ()
        return ((b"retry-after", b"%d" % max(1, math.ceil(self.retry_after_s))),)


def error_type(status: int) -> str:
    """OpenAI's word for a status."""
    if status == 429:
        return "rate_limit_error"
    return "invalid_request_error" if status < 500 else "server_error"


_END_CODES = {429: "overloaded", 503: "unavailable", 504: "deadline_exceeded"}


def from_end(end: End) -> RequestError:
    """What the router's one ending of a failed request says to its client."""
    return RequestError(
        end.reason,
        status=end.status,
        code=_END_CODES.get(end.status),
        retry_after_s=end.retry_after_s,
    )
