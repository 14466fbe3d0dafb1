"""What the side that writes (initiator) and the side that is written to (target) say to each other."""

from __future__ import annotations

import msgspec


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    pass


class Meet(Message, frozen=True):
    """-> target: reach me there, and say Ready."""

    address: bytes


class Clear(Message, frozen=True):
    """-> target: zero the first `nbytes` of your region, and say Ready."""

    nbytes: int


class Sum(Message, frozen=True):
    """-> target: say Checksum of the first `nbytes` of your region."""

    nbytes: int


class Done(Message, frozen=True):
    """-> target: end."""


class Address(Message, frozen=True):
    """target ->, first of all: its region is made; it is reached there."""

    address: bytes


class Ready(Message, frozen=True):
    """target ->"""


class Checksum(Message, frozen=True):
    """target -> zlib.crc32."""

    value: int


class Trouble(Message, frozen=True):
    """target ->, last of all: why it ends."""

    reason: str


ToTarget = Meet | Clear | Sum | Done
FromTarget = Address | Ready | Checksum | Trouble
