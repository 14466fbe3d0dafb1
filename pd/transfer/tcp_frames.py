"""What two ends of a transfer connection say to each other. Pure: bytes to values and back.

    initiator                                    acceptor
    hello(nonce, generation, lane, name)   ──►
                                           ◄──   CHALLENGE nonce
    PROOF proof                            ──►
                                           ◄──   WELCOME(nbytes of its region) proof | REFUSED(reason)
    WRITE(ticket, entries) payload         ──►   payload goes straight into the region
                                           ◄──   ACK(ticket), once the last WRITE of the ticket is in place
    READ(ticket, entries)                  ──►
                                           ◄──   DATA(ticket) payload, one for each READ
                                           ◄──   REFUSED(reason), then the end, for nonsense

An entry is (offset, nbytes) in the acceptor's region. Numbers are big-endian. A proof is an HMAC over both nonces and
the whole hello, under the acceptor's secret and the cluster's key, if there is one: neither is ever sent here. What
follows the welcome is neither encrypted nor signed.
"""

from __future__ import annotations

import enum
import hmac
import struct
from collections.abc import Sequence
from typing import NamedTuple

from pd.transfer.transport import TransferError

SECRET_NBYTES = 16
NONCE_NBYTES = 16
PROOF_NBYTES = 32
MAX_ENTRIES = 4096
"""Of one frame; a job with more takes several. 64 KiB of table is read before any of it is believed."""
MAX_NAME_NBYTES = 255
MAX_REASON_NBYTES = 1024
MAX_LANES = 16

_MAGIC = b"pdxfer\x00\x02"
_HELLO = struct.Struct(f"!{len(_MAGIC)}s{NONCE_NBYTES}sQHH")
_HEADER = struct.Struct("!BBHIQQ")
_ENTRY = struct.Struct("!QQ")

HELLO_NBYTES = _HELLO.size
HEADER_NBYTES = _HEADER.size
ENTRY_NBYTES = _ENTRY.size


class FrameError(TransferError):
    """The other end's nonsense, or its refusal."""


class Kind(enum.IntEnum):
    WELCOME = 1
    REFUSED = 2
    WRITE = 3
    ACK = 4
    READ = 5
    DATA = 6
    CHALLENGE = 7
    PROOF = 8


_SIZES = {Kind.CHALLENGE: NONCE_NBYTES, Kind.PROOF: PROOF_NBYTES}
"""Of the payloads that have but one size. A WELCOME's proof is not in its `nbytes`: that is the region's."""


class Prover(enum.Enum):
    """Whose proof it is, so that none can be sent back as the other's."""

    INITIATOR = b"pd transfer initiator"
    ACCEPTOR = b"pd transfer acceptor"


class Hello(NamedTuple):
    nonce: bytes
    generation: int  # of the initiator's connections to this acceptor; a higher one ends all lower ones
    lane: int
    name_nbytes: int


class Frame(NamedTuple):
    """A header. `nbytes` is the payload behind the table; for ACK nothing follows."""

    kind: Kind
    is_last: bool  # of its ticket
    num_entries: int  # in the table
    ticket: int
    nbytes: int


class Entry(NamedTuple):
    offset: int
    nbytes: int


def pack_hello(nonce: bytes, generation: int, lane: int, name: str) -> bytes:
    told = name.encode()
    return _HELLO.pack(_MAGIC, nonce, generation, lane, len(told)) + told


def prove(who: Prover, secret: bytes, hello: bytes, challenge: bytes) -> bytes:
    """PROOF_NBYTES. `hello` is all of it, name included; `secret` comes from `mixed`."""
    return hmac.digest(secret, who.value + challenge + hello, "sha256")


def mixed(secret: bytes, key: bytes | None) -> bytes:
    """A region's secret, tied to the cluster's key: who has not both can prove nothing."""
    return hmac.digest(key or b"", secret, "sha256")


def unpack_hello(data: bytes) -> Hello:
    """`data` is HELLO_NBYTES long; the name follows. Raises FrameError."""
    magic, nonce, generation, lane, name_nbytes = _HELLO.unpack(data)
    if magic != _MAGIC:
        raise FrameError(f"a hello begins with {_MAGIC!r}, not {magic!r}")
    if lane >= MAX_LANES or not 0 < name_nbytes <= MAX_NAME_NBYTES:
        raise FrameError(f"a hello of lane {lane} with a name of {name_nbytes} bytes")
    return Hello(nonce, generation, lane, name_nbytes)


def pack(frame: Frame, entries: Sequence[Entry] = ()) -> bytes:
    header = _HEADER.pack(frame.kind, frame.is_last, 0, frame.num_entries, frame.ticket, frame.nbytes)
    return header + struct.pack(f"!{2 * len(entries)}Q", *(value for entry in entries for value in entry))


def pack_refusal(reason: str) -> bytes:
    told = reason.encode(errors="replace")[:MAX_REASON_NBYTES]
    return pack(Frame(Kind.REFUSED, True, 0, 0, len(told))) + told


def unpack(data: bytes) -> Frame:
    """`data` is HEADER_NBYTES long. Raises FrameError on a kind or a length that no end may send."""
    kind, is_last, _, num_entries, ticket, nbytes = _HEADER.unpack(data)
    if kind not in Kind.__members__.values():
        raise FrameError(f"unknown frame kind {kind}")
    frame = Frame(Kind(kind), bool(is_last), num_entries, ticket, nbytes)
    has_table = frame.kind in (Kind.WRITE, Kind.READ)
    if num_entries > (MAX_ENTRIES if has_table else 0):
        raise FrameError(f"a {frame.kind.name} frame with {num_entries} entries")
    if frame.kind is Kind.REFUSED and nbytes > MAX_REASON_NBYTES:
        raise FrameError(f"a refusal of {nbytes} bytes")
    if frame.kind in _SIZES and nbytes != _SIZES[frame.kind]:
        raise FrameError(f"a {frame.kind.name} of {nbytes} bytes")
    return frame


def unpack_entries(frame: Frame, table: bytes, region_nbytes: int) -> list[Entry]:
    """Raises FrameError unless every entry lies in the region and together they are the payload."""
    entries = [Entry(*pair) for pair in _ENTRY.iter_unpack(table)]
    for offset, nbytes in entries:
        if nbytes < 1 or offset + nbytes > region_nbytes:
            raise FrameError(
                f"{frame.kind.name} of {nbytes} bytes at {offset} leaves the region of {region_nbytes} bytes"
            )
    if sum(entry.nbytes for entry in entries) != frame.nbytes:
        raise FrameError(f"a {frame.kind.name} frame says {frame.nbytes} bytes, its entries do not")
    return entries
