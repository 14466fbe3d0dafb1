"""Faults planted in a rank's staging."""

from __future__ import annotations

from pd.transfer.staging import Begun, Staging
from tests.cluster.planting import Patch, Plant, instead


def put_all_in_one_slot(patch: Patch) -> None:
    begin = Staging.begin

    def begin_there(self: Staging) -> Begun | None:
        begun = begin(self)
        return begun._replace(slot=0) if begun is not None else None

    patch.setattr(Staging, "begin", begin_there)


def end_all(*, in_doubt: bool) -> Plant:
    end = Staging.end
    return instead(Staging, "end", lambda self, part, **_: end(self, part, in_doubt=in_doubt))


def keep_the_last_slot(patch: Patch) -> None:
    begin = Staging.begin
    patch.setattr(Staging, "begin", lambda self: begin(self) if len(self._free) > 1 else None)


STAGING_FAULTS: dict[str, Plant] = {
    "two parts are in one slot": put_all_in_one_slot,
    "a slot that a lost peer's read may reach is free": end_all(in_doubt=False),
    "no slot comes back": end_all(in_doubt=True),
    "what is in doubt stays so when its peer is severed": instead(Staging, "settle", lambda self, peer: None),
    "the last slot is given to nobody": keep_the_last_slot,
}
