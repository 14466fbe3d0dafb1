// The small operations of a layer: norm, activation, rotation with the write into the pool. Bound by calls and memory.
#pragma once

#include "ops.h"
#include "vec.h"

namespace {

template <class T> inline F some(const T* p, int64_t n) { return n >= W ? load(p) : load_some(p, n); }
template <class T> inline void put(T* p, F x, int64_t n) {
  if (n >= W) store(p, x);
  else store_some(p, x, n);
}

template <class T> void norm_row(const pd::Norm& job, int64_t row) {
  const T* x = static_cast<const T*>(job.x) + row * job.x_stride;
  const T* weight = static_cast<const T*>(job.weight);
  T* out = static_cast<T*>(job.out) + row * job.size;
  if (job.residual) {
    T* residual = static_cast<T*>(job.residual) + row * job.residual_stride;
    for (int64_t i = 0; i < job.size; i += W) {
      const int64_t left = job.size - i;
      put(residual + i, add(some(residual + i, left), some(x + i, left)), left);
    }
    x = residual;
  }
  F squares[4] = {zero(), zero(), zero(), zero()};  // four chains, to cover the latency
  int64_t i = 0;
  for (; i + 4 * W <= job.size; i += 4 * W)
    for (int c = 0; c < 4; ++c) {
      const F value = load(x + i + c * W);
      squares[c] = fma(value, value, squares[c]);
    }
  for (; i < job.size; i += W) {
    const F value = some(x + i, job.size - i);
    squares[0] = fma(value, value, squares[0]);
  }
  const float total = sum(add(add(squares[0], squares[1]), add(squares[2], squares[3])));
  const F scale = splat(1.0f / __builtin_sqrtf(total / static_cast<float>(job.size) + job.eps));
  for (i = 0; i < job.size; i += W) {
    const int64_t left = job.size - i;
    put(out + i, mul(some(weight + i, left), rounded(mul(some(x + i, left), scale), x)), left);
  }
}

template <class T> void norm(const pd::Norm& job) {
  pd::parallel_for(
      job.rows, 16,
      [](const void* context, int64_t begin, int64_t end) {
        const auto& job = *static_cast<const pd::Norm*>(context);
        for (int64_t row = begin; row < end; ++row) norm_row<T>(job, row);
      },
      &job);
}

template <class T> void silu(const pd::Silu& job) {
  pd::parallel_for(
      job.rows, 8,
      [](const void* context, int64_t begin, int64_t end) {
        const auto& job = *static_cast<const pd::Silu*>(context);
        for (int64_t row = begin; row < end; ++row) {
          const T* gate = static_cast<const T*>(job.gate_up) + row * job.stride;
          const T* up = gate + job.size;
          T* out = static_cast<T*>(job.out) + row * job.size;
          for (int64_t i = 0; i < job.size; i += W) {
            const int64_t left = job.size - i;
            const F x = some(gate + i, left);
            const F sigmoid_below = add(splat(1.0f), exp(sub(zero(), x)));
            put(out + i, mul(rounded(div(x, sigmoid_below), gate), some(up + i, left)), left);
          }
        }
      },
      &job);
}

// Rotates the first 2 * half elements of one head, copies the others. `from` may be `to`.
template <class T>
inline void rotate(const T* from, T* to, const float* cos, const float* sin, int64_t half, int64_t size) {
  for (int64_t d = 0; d < half; d += W) {
    const int64_t left = half - d;
    const F low = some(from + d, left), high = some(from + half + d, left);
    const F c = some(cos + d, left), s = some(sin + d, left);
    put(to + d, sub(mul(low, c), mul(high, s)), left);
    put(to + half + d, add(mul(high, c), mul(low, s)), left);
  }
  if (from != to && size > 2 * half)
    memcpy(to + 2 * half, from + 2 * half, static_cast<size_t>(size - 2 * half) * sizeof(T));
}

template <class T> void rope(const pd::Rope& job) {
  pd::parallel_for(
      job.tokens, 8,
      [](const void* context, int64_t begin, int64_t end) {
        const auto& job = *static_cast<const pd::Rope*>(context);
        for (int64_t t = begin; t < end; ++t) {
          const float* cos = job.cos + t * job.half;
          const float* sin = job.sin + t * job.half;
          for (int64_t h = 0; h < job.heads; ++h) {
            T* q = static_cast<T*>(job.q) + t * job.q_token + h * job.q_head;
            rotate(q, q, cos, sin, job.half, job.k_size);
          }
          for (int64_t h = 0; h < job.kv_heads; ++h) {
            const T* key = static_cast<const T*>(job.k) + t * job.k_token + h * job.k_head;
            const T* value = static_cast<const T*>(job.v) + t * job.v_token + h * job.v_head;
            const int64_t page = job.pages[t], offset = job.offsets[t];
            T* key_to = static_cast<T*>(job.k_pool) + page * job.kp_page + h * job.kp_head + offset * job.kp_token;
            T* value_to = static_cast<T*>(job.v_pool) + page * job.vp_page + h * job.vp_head + offset * job.vp_token;
            rotate(key, key_to, cos, sin, job.half, job.k_size);
            memcpy(value_to, value, static_cast<size_t>(job.v_size) * sizeof(T));
          }
        }
      },
      &job);
}

}  // namespace
