"""Triton kernels, one source for CUDA and ROCm: tensors in, tensors out; installed as `pd.kernels`.

Rules
1. A file a kernel: the maths in its docstring, the kernel, a launcher that checks shapes, and `reference` in PyTorch.
2. Strides are arguments; what an index of a page multiplies is 64 bits wide: a pool is larger than 2^31 elements.
3. What differs between devices stands in `target` (facts) and `tuning` (block sizes, warps, stages) and nowhere else.
4. An argument that changes from step to step is not specialized for (`do_not_specialize`): Triton would compile anew
   for 1, for multiples of 16 and for the rest, half a second each, in the midst of service.
5. No inline assembly, no builtin of one vendor, no autotuning: a launch is chosen by a table, the same every time.
"""
