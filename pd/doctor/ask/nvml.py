"""NVML, through nvidia-ml-py. A query that a card does not support is None, not an error."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

import pynvml

from pd.doctor.answers import Nvml, NvmlGpu

T = TypeVar("T")

THROTTLE = {
    pynvml.nvmlClocksThrottleReasonHwSlowdown: "hardware slowdown",
    pynvml.nvmlClocksThrottleReasonHwThermalSlowdown: "heat (hardware)",
    pynvml.nvmlClocksThrottleReasonSwThermalSlowdown: "heat",
    pynvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown: "power brake",
}
P2P = {
    pynvml.NVML_P2P_STATUS_OK: "ok",
    pynvml.NVML_P2P_STATUS_CHIPSET_NOT_SUPPORTED: "chipset not supported",
    pynvml.NVML_P2P_STATUS_GPU_NOT_SUPPORTED: "GPU not supported",
    pynvml.NVML_P2P_STATUS_IOH_TOPOLOGY_NOT_SUPPORTED: "topology not supported",
    pynvml.NVML_P2P_STATUS_DISABLED_BY_REGKEY: "disabled by the driver's settings",
    pynvml.NVML_P2P_STATUS_NOT_SUPPORTED: "not supported",
}
FABRIC = {
    pynvml.NVML_GPU_FABRIC_STATE_NOT_STARTED: "not started",
    pynvml.NVML_GPU_FABRIC_STATE_IN_PROGRESS: "in progress",
    pynvml.NVML_GPU_FABRIC_STATE_COMPLETED: "completed",
}


def answer() -> Nvml:
    """Raises NVMLError where there is no driver, or its halves differ."""
    pynvml.nvmlInit()
    handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
    cuda = pynvml.nvmlSystemGetCudaDriverVersion_v2()
    return Nvml(
        driver=pynvml.nvmlSystemGetDriverVersion(),
        cuda=f"{cuda // 1000}.{cuda % 1000 // 10}",
        gpus=tuple(_gpu(h) for h in handles),
        p2p=tuple(tuple("self" if a is b else _p2p(a, b) for b in handles) for a in handles),
    )


def _gpu(handle: object) -> NvmlGpu:
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    bar1 = _ask(lambda: pynvml.nvmlDeviceGetBAR1MemoryInfo(handle))
    ecc = _ask(lambda: pynvml.nvmlDeviceGetEccMode(handle)[0])
    remap = _ask(lambda: pynvml.nvmlDeviceGetRemappedRows(handle)) or (0, 0, 0, 0)
    reasons = _ask(lambda: pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)) or 0
    persistence = _ask(lambda: pynvml.nvmlDeviceGetPersistenceMode(handle))
    links = [_ask(partial(pynvml.nvmlDeviceGetNvLinkState, handle, n)) for n in range(pynvml.NVML_NVLINK_MAX_LINKS)]
    return NvmlGpu(
        name=pynvml.nvmlDeviceGetName(handle),
        bus=pynvml.nvmlDeviceGetPciInfo(handle).busId.lower()[-12:],
        memory=memory.total,
        memory_used=memory.used,
        bar1=bar1.bar1Total if bar1 else None,
        ecc=None if ecc is None else bool(ecc),
        uncorrected=_uncorrected(handle),
        remap_pending=bool(remap[2]),
        remap_failed=bool(remap[3]),
        persistence=None if persistence is None else bool(persistence),
        mig=bool((_ask(lambda: pynvml.nvmlDeviceGetMigMode(handle)) or (0, 0))[0]),
        throttled=tuple(word for bit, word in THROTTLE.items() if reasons & bit),
        links_up=links.count(1),
        links_down=links.count(0),
        fabric=_fabric(handle),
    )


def _uncorrected(handle: object) -> int:
    kind, counter = pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC
    return _ask(lambda: int(pynvml.nvmlDeviceGetTotalEccErrors(handle, kind, counter))) or 0


def _fabric(handle: object) -> str | None:
    """None: this GPU takes no part in an NVSwitch fabric, or the driver is too old to say."""
    state = pynvml.c_nvmlGpuFabricInfo_t()
    if _ask(lambda: pynvml.nvmlDeviceGetGpuFabricInfo(handle, state) or True) is None:
        return None
    return FABRIC.get(state.state)


def _p2p(a: object, b: object) -> str:
    status = _ask(lambda: pynvml.nvmlDeviceGetP2PStatus(a, b, pynvml.NVML_P2P_CAPS_INDEX_READ))
    return P2P.get(status, "unknown")


def _ask(query: Callable[[], T]) -> T | None:
    try:
        return query()
    except pynvml.NVMLError:
        return None
