"""A page of a device's memory written to another page of it through one NIC, by nixl, and compared."""

from __future__ import annotations

import os
import time

import torch

NBYTES = 2 << 20
DEADLINE_S = 10.0
TRANSPORTS = {"cuda": "rc,cuda_copy", "hip": "rc,rocm_copy", "cpu": "tcp"}
"""Leaves UCX no way but the NIC: no shared memory, no NVLink, no copy within the process. `cpu` is for trying it
out."""


def write_through(nic: str, kind: str) -> str:
    """`nic` as UCX names it, "mlx5_0:1". What went wrong; "" when the bytes arrived.

    Sets UCX's variables, so call it once, in a process of its own. Raises ModuleNotFoundError without nixl.
    """
    os.environ.update(UCX_TLS=TRANSPORTS[kind], UCX_NET_DEVICES=nic)
    from nixl._api import nixl_agent, nixl_agent_config  # after UCX's variables, which it reads once

    device = "cpu" if kind == "cpu" else "cuda"
    source = torch.arange(NBYTES, dtype=torch.int64).to(torch.uint8).to(device)
    target = torch.zeros(NBYTES, dtype=torch.uint8, device=device)
    config = nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
    try:
        mine, theirs = nixl_agent("pd-doctor-from", config), nixl_agent("pd-doctor-to", config)
        mine.register_memory(source)
        theirs.register_memory(target)
        name = mine.add_remote_agent(theirs.get_agent_metadata())
        handle = mine.initialize_xfer("WRITE", mine.get_xfer_descs(source), mine.get_xfer_descs(target), name.decode())
        state, end = mine.transfer(handle), time.monotonic() + DEADLINE_S
        while state == "PROC" and time.monotonic() < end:
            theirs.get_new_notifs()  # the passive side's library does its part only when asked
            state = mine.check_xfer_state(handle)
    except Exception as error:  # noqa: BLE001  nixl's bindings raise their own kinds, all of them an answer here
        return f"{type(error).__name__}: {error}"
    if state != "DONE":
        return "nixl says it failed" if state == "ERR" else f"not done after {DEADLINE_S:.0f} s"
    return "" if torch.equal(source.cpu(), target.cpu()) else "the bytes that arrived differ"
