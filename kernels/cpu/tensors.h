// What the binding asks of tensors, and the memory it hands out.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <vector>

namespace pd {
namespace {

using at::Tensor;

// Memory of the calling thread that grows and stays: a fresh large tensor would be mapped and faulted in every step.
inline void* scratch(int64_t nbytes) {
  thread_local std::vector<char> memory;
  if (static_cast<int64_t>(memory.size()) < nbytes + 64) memory.resize(nbytes + nbytes / 4 + 64);
  return reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(memory.data()) + 63) / 64 * 64);
}

inline bool is_bf16(const Tensor& x, const char* name) {
  TORCH_CHECK(x.device().is_cpu(), name, " is on ", x.device(), ", not on the CPU");
  TORCH_CHECK(x.scalar_type() == at::kBFloat16 || x.scalar_type() == at::kFloat, name, " is ", x.scalar_type(),
              ", not bfloat16 or float32");
  return x.scalar_type() == at::kBFloat16;
}

inline void check_like(const Tensor& x, const Tensor& model, const char* name) {
  TORCH_CHECK(x.device().is_cpu() && x.scalar_type() == model.scalar_type(), name, " is ", x.scalar_type(), " on ",
              x.device(), ", the others ", model.scalar_type(), " on the CPU");
}

inline void check_dense(const Tensor& x, at::ScalarType type, const char* name) {
  TORCH_CHECK(x.device().is_cpu() && x.scalar_type() == type && x.is_contiguous(), name, " must be contiguous ", type,
              " on the CPU, is ", x.scalar_type(), " with strides ", x.strides());
}

inline void check_rows(const Tensor& x, const char* name) {
  TORCH_CHECK(x.dim() >= 1 && (x.stride(-1) == 1 || x.size(-1) <= 1), name,
              " must have unit stride in its last dim, has ", x.strides());
}

// x as rows of its last dim, one stride apart: itself where its leading dims allow it, else a copy.
inline Tensor as_rows(const Tensor& x) {
  if (x.dim() == 2) return x;
  return x.reshape({-1, x.size(-1)});
}

inline Tensor with_last(const Tensor& x, int64_t last) {
  std::vector<int64_t> sizes(x.sizes().begin(), x.sizes().end());
  sizes.back() = last;
  return at::empty(sizes, x.options());
}

}  // namespace
}  // namespace pd
