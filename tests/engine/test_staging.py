"""A step's arrays share one buffer and come out of it as they went in."""

from __future__ import annotations

import numpy as np
import torch

from pd.runtime.engine.staging import ALIGNMENT, Download, fill, places, upload, views

ARRAYS = [
    np.arange(5, dtype=np.int64),
    np.zeros((0, 3), dtype=np.int32),
    np.arange(6, dtype=np.int32).reshape(2, 3).T,
    np.array([1.5, -2.0, 3.0], dtype=np.float32),
    np.array(7, dtype=np.int64).reshape(1),
]


def test_arrays_go_through_one_buffer_unchanged_and_aligned() -> None:
    offsets, nbytes = places(ARRAYS)
    assert all(offset % ALIGNMENT == 0 for offset in offsets) and nbytes % ALIGNMENT == 0
    buffer = torch.full((nbytes,), 255, dtype=torch.uint8)
    fill(buffer, ARRAYS, offsets)
    for array, tensor in zip(ARRAYS, views(buffer, ARRAYS, offsets), strict=True):
        assert tensor.shape == array.shape and np.array_equal(tensor.numpy(), array)


def test_on_a_cpu_nothing_is_copied() -> None:
    array = np.arange(4)
    (tensor,) = upload([array], torch.device("cpu"))
    array[2] = 9
    assert tensor.tolist() == [0, 1, 9, 3]
    download = Download(tensor)
    assert download.is_done() and download.wait()[0] is tensor
