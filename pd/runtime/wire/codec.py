"""Bytes <-> messages: msgpack by msgspec, validated on the way in. Pure."""

from __future__ import annotations

import msgspec

from pd.runtime.wire.messages import AnyMessage

MAX_MESSAGE_BYTES = 64 << 20
"""A prompt of a million tokens is 5 MB; anything near this is nonsense."""


class WireError(Exception):
    """A peer's nonsense: drop the message, count it, go on."""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(AnyMessage)


def encode(message: AnyMessage) -> bytes:
    return _encoder.encode(message)


def decode(frame: bytes | memoryview) -> AnyMessage:
    """Raises WireError for anything that is not exactly one known message."""
    if len(frame) > MAX_MESSAGE_BYTES:
        raise WireError(f"message of {len(frame)} bytes; at most {MAX_MESSAGE_BYTES} are read")
    try:
        return _decoder.decode(frame)
    except (msgspec.DecodeError, RecursionError) as error:
        raise WireError(str(error)) from error
