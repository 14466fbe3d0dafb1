"""The proof of GPUDirect RDMA: a page of GPU memory registered with each NIC, then a write through one.

Tries ibv_reg_mr, which needs a peer-memory module, then ibv_reg_dmabuf_mr with a dma-buf that the CUDA driver exports.
"""

from __future__ import annotations

import ctypes
import os

import torch

from pd.doctor.answers import Gdr
from pd.doctor.ask.verbs import load
from pd.doctor.measure.through import write_through

NBYTES = 2 << 20
"""The granularity of CUDA's exports."""
ACCESS = 0b111
"""IBV_ACCESS_LOCAL_WRITE | REMOTE_WRITE | REMOTE_READ."""
WAYS = ("peermem", "dma-buf")
DMA_BUF_FD = 1
"""CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD."""


def answer() -> Gdr:
    page = torch.zeros(NBYTES, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    ib = _signatures(load())
    count = ctypes.c_int()
    listed = ib.ibv_get_device_list(ctypes.byref(count))
    registered = {}
    for i in range(count.value):
        name = ib.ibv_get_device_name(listed[i]).decode()
        registered[name] = _register(ib, listed[i], page.data_ptr())
    first = next((nic for nic, way in registered.items() if way in WAYS), None)
    if first is None:
        return Gdr(registered=registered, wrote=None, error="no NIC registered the page")
    if os.path.realpath(f"/sys/class/infiniband/{first}/device/driver").endswith("/efa"):
        return Gdr(registered=registered, wrote=None, error="not on EFA: libfabric's fi_rma_bw -D cuda does")
    try:
        error = write_through(f"{first}:1", "hip" if torch.version.hip else "cuda")
    except ModuleNotFoundError as missing:
        return Gdr(registered=registered, wrote=None, error=f"{missing.name} is not installed")
    return Gdr(registered=registered, wrote=not error, error=error)


def _signatures(ib: ctypes.CDLL) -> ctypes.CDLL:
    ib.ibv_alloc_pd.restype = ctypes.c_void_p
    ib.ibv_alloc_pd.argtypes = [ctypes.c_void_p]
    ib.ibv_dealloc_pd.argtypes = [ctypes.c_void_p]
    ib.ibv_reg_mr.restype = ctypes.c_void_p
    ib.ibv_reg_mr.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    ib.ibv_reg_dmabuf_mr.restype = ctypes.c_void_p
    ib.ibv_reg_dmabuf_mr.argtypes = [
        *(ctypes.c_void_p, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_uint64, ctypes.c_int, ctypes.c_int)
    ]
    ib.ibv_dereg_mr.argtypes = [ctypes.c_void_p]
    return ib


def _register(ib: ctypes.CDLL, device: int, address: int) -> str:
    """How one NIC took it, or what it said."""
    context = ib.ibv_open_device(device)
    if not context:
        return f"does not open: {os.strerror(ctypes.get_errno())}"
    domain = ib.ibv_alloc_pd(context)
    try:
        region = ib.ibv_reg_mr(domain, address, NBYTES, ACCESS)
        said = os.strerror(ctypes.get_errno())
        way = WAYS[0]
        if not region:
            region, way = _by_dmabuf(ib, domain, address), WAYS[1]
        if not region:
            return f"ibv_reg_mr: {said}; dma-buf: {os.strerror(ctypes.get_errno())}"
        ib.ibv_dereg_mr(region)
        return way
    finally:
        ib.ibv_dealloc_pd(domain)
        ib.ibv_close_device(context)


def _by_dmabuf(ib: ctypes.CDLL, domain: int, address: int) -> int | None:
    fd = _export(address)
    if fd is None:
        return None
    try:
        region: int | None = ib.ibv_reg_dmabuf_mr(domain, 0, NBYTES, address, fd, ACCESS)
        return region
    finally:
        os.close(fd)


def _export(address: int) -> int | None:
    """A dma-buf of the page: cuMemGetHandleForAddressRange, or HSA's portable export. None: the driver refuses."""
    fd = ctypes.c_int(-1)
    if torch.version.hip:
        offset = ctypes.c_uint64()
        hsa = ctypes.CDLL("libhsa-runtime64.so.1")
        size = ctypes.c_size_t(NBYTES)
        code = hsa.hsa_amd_portable_export_dmabuf(
            ctypes.c_void_p(address), size, ctypes.byref(fd), ctypes.byref(offset)
        )
    else:
        cuda = ctypes.CDLL("libcuda.so.1")
        code = cuda.cuMemGetHandleForAddressRange(
            ctypes.byref(fd), ctypes.c_uint64(address), ctypes.c_size_t(NBYTES), DMA_BUF_FD, ctypes.c_ulonglong(0)
        )
    return fd.value if code == 0 else None
