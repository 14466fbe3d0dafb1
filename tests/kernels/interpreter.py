"""Triton's interpreter, mended: bfloat16 is computed as such, and an address outside the launch's tensors is an error.

The interpreter keeps bfloat16 as 16 raw bits and adds, multiplies and reduces those (errors of 1e10, no exception;
upstream calls it unsupported). Here they are widened to float32, computed and rounded to nearest even. Its loads and
stores go wherever a pointer says, at best to a segmentation fault; here every active lane must lie within the storage
of some tensor that the launch was given. `debug` makes an int32 overflow in an address an error as well.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch
import triton.experimental.gluon.language  # noqa: F401 (asks, at import, whether kernels are interpreted)
import triton.language as tl
from triton.runtime import interpreter

Handle = interpreter.TensorHandle
Builder = interpreter.InterpreterBuilder


def install() -> None:
    """Once a process, before the first launch."""
    _install_bfloat16()
    _install_bounds()
    options = dataclasses.replace(interpreter.interpreter_builder.options, debug=True)
    interpreter.interpreter_builder.options = options


# ---- bfloat16 ---------------------------------------------------------------------------------------------------


def _is_bf16(handle: Any) -> bool:
    return isinstance(handle, Handle) and handle.dtype.scalar == tl.bfloat16


def _wide(handle: Any) -> Any:
    if not _is_bf16(handle):
        return handle
    return Handle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


def _bits(values: np.ndarray) -> np.ndarray:
    """float32 -> bfloat16's bits, nearest even."""
    u = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = ((u + 0x7FFF + ((u >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded.reshape(np.shape(values)))


def _narrow(values: np.ndarray) -> Any:
    return Handle(_bits(values), tl.bfloat16)


def _install_bfloat16() -> None:
    names = ("binary_op", "unary_op", "create_dot", "create_fma", "cast_impl")
    plain = {name: getattr(Builder, name) for name in names}
    bitwise = (np.bitwise_and, np.bitwise_or, np.bitwise_xor)

    def binary_op(self: Any, left: Any, right: Any, op: Any) -> Any:
        if not (_is_bf16(left) and _is_bf16(right)) or op in bitwise:
            return plain["binary_op"](self, left, right, op)
        out = op(_wide(left).data, _wide(right).data)
        return Handle(out, tl.bfloat16) if out.dtype == bool else _narrow(out)

    def unary_op(self: Any, x: Any, op: Any) -> Any:
        return _narrow(op(_wide(x).data)) if _is_bf16(x) else plain["unary_op"](self, x, op)

    def create_dot(self: Any, a: Any, b: Any, *rest: Any, **named: Any) -> Any:
        return plain["create_dot"](self, _wide(a), _wide(b), *rest, **named)

    def create_fma(self: Any, x: Any, y: Any, z: Any) -> Any:
        if not _is_bf16(x):
            return plain["create_fma"](self, x, y, z)
        return _narrow(_wide(x).data * _wide(y).data + _wide(z).data)

    def cast_impl(self: Any, x: Any, to: Any) -> Any:
        target = to.scalar
        if _is_bf16(x) and target != tl.bfloat16:
            wide = _wide(x)
            return wide if target == tl.float32 else plain["cast_impl"](self, wide, to)
        if target == tl.bfloat16 and not _is_bf16(x):
            return _narrow(x.data.astype(np.float32))
        return plain["cast_impl"](self, x, to)

    for patch in (binary_op, unary_op, create_dot, create_fma, cast_impl):
        setattr(Builder, patch.__name__, patch)


# ---- addresses --------------------------------------------------------------------------------------------------


def _install_bounds() -> None:
    reach: list[tuple[np.ndarray, np.ndarray]] = []  # of the launch that runs: starts and ends of its storages
    load, store, launch = Builder.create_masked_load, Builder.create_masked_store, interpreter.GridExecutor.__call__

    def check(pointers: Any, mask: Any, what: str) -> None:
        lanes = pointers.data[np.broadcast_to(mask.data, pointers.data.shape).astype(bool)].astype(np.uint64).ravel()
        if not reach or lanes.size == 0:
            return
        starts, ends = reach[-1]
        at = np.searchsorted(starts, lanes, side="right").astype(np.int64) - 1
        bad = (at < 0) | (lanes >= ends[np.maximum(at, 0)])
        if bad.any():
            raise IndexError(f"out-of-bounds {what}: {int(bad.sum())} of {lanes.size} lanes")

    def checked_load(self: Any, pointers: Any, mask: Any, *rest: Any, **named: Any) -> Any:
        check(pointers, mask, "load")
        return load(self, pointers, mask, *rest, **named)

    def checked_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any, **named: Any) -> Any:
        check(pointers, mask, "store")
        return store(self, pointers, value, mask, *rest, **named)

    def checked_launch(self: Any, *args: Any, **named: Any) -> Any:
        storages = [a.untyped_storage() for a in (*args, *named.values()) if isinstance(a, torch.Tensor)]
        spans = sorted({(s.data_ptr(), s.data_ptr() + s.nbytes()) for s in storages})
        reach.append((np.array([a for a, _ in spans], np.uint64), np.array([b for _, b in spans], np.uint64)))
        try:
            return launch(self, *args, **named)
        finally:
            reach.pop()

    Builder.create_masked_load, Builder.create_masked_store = checked_load, checked_store
    interpreter.GridExecutor.__call__ = checked_launch
