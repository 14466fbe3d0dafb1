"""libibverbs by ctypes: lists devices and opens each."""

from __future__ import annotations

import ctypes

from pd.doctor.answers import Verbs


def load() -> ctypes.CDLL:
    """The library with the signatures used here. Raises OSError where it is not installed."""
    ib = ctypes.CDLL("libibverbs.so.1", use_errno=True)
    ib.ibv_get_device_list.restype = ctypes.POINTER(ctypes.c_void_p)
    ib.ibv_get_device_list.argtypes = [ctypes.POINTER(ctypes.c_int)]
    ib.ibv_free_device_list.argtypes = [ctypes.POINTER(ctypes.c_void_p)]
    ib.ibv_get_device_name.restype = ctypes.c_char_p
    ib.ibv_get_device_name.argtypes = [ctypes.c_void_p]
    ib.ibv_open_device.restype = ctypes.c_void_p
    ib.ibv_open_device.argtypes = [ctypes.c_void_p]
    ib.ibv_close_device.argtypes = [ctypes.c_void_p]
    return ib


def answer() -> Verbs:
    try:
        ib = load()
    except OSError as error:
        return Verbs(devices=(), opened=(), error=str(error))
    count = ctypes.c_int()
    listed = ib.ibv_get_device_list(ctypes.byref(count))
    names, opened = [], []
    for i in range(count.value):
        name = ib.ibv_get_device_name(listed[i]).decode()
        names.append(name)
        context = ib.ibv_open_device(listed[i])
        if context:
            opened.append(name)
            ib.ibv_close_device(context)
    if listed:
        ib.ibv_free_device_list(listed)
    return Verbs(devices=tuple(names), opened=tuple(opened), error="")
