// y = x w^T + bias for weights packed in panels of 16 outputs, from one row to thousands.
//
// Each output is one chain over the inputs in order: acc = fma(w[i], x[i], acc) in float, whatever the number of rows,
// the blocking or the threads; so a row's bits never depend on its batch. (AVX512-BF16 chains dpbf16 over input pairs.)
// Registers hold `rows x vectors` accumulators, as in Goto and van de Geijn, "Anatomy of High-Performance Matrix
// Multiplication", 2008; a bf16 weight is widened once for all rows of its block. x is laid out in blocks of rows,
// [input][row of the block], so that the inner loop reads it in one stream.
#pragma once

#include "ops.h"
#include "vec.h"

namespace {

constexpr int VECTORS = pd::PANEL / W;  // of a panel
constexpr int MAX_ROWS = REGISTERS == 32 ? 12 : 6;
constexpr int64_t CHUNK_BYTES = 384 << 10;  // of x at a time: stays in a 512 KB second-level cache beside a panel

// Accumulator vectors a row for a block of `rows`: as many as registers hold, since few rows need many chains in
// flight to cover the latency of a multiply-add (4 cycles, 2 a cycle) and the memory's.
constexpr int vectors_for(int rows) {
  return REGISTERS == 32 ? (rows <= 2 ? 8 : rows <= 6 ? 4 : 2) : (rows == 1 ? 8 : rows <= 3 ? 4 : 2);
}

#if defined(PD_AVX512BF16)

using XWord = uint32_t;  // two neighbouring inputs in bf16
constexpr bool HAS_DOT = true;

template <int ROWS, int VECS>
inline void multiply(F (&acc)[ROWS][VECS], const bf16* w, int64_t panel, const XWord* x, int64_t inputs) {
  for (int64_t i = 0; i < inputs; i += 2, w += 2 * pd::PANEL, x += ROWS) {
    PD_UNROLL for (int v = 0; v < VECS; ++v) {
      const __m512bh pair = reinterpret_cast<__m512bh>(load_u(w + v * panel));
      PD_UNROLL for (int r = 0; r < ROWS; ++r)
        acc[r][v] = _mm512_dpbf16_ps(acc[r][v], pair, reinterpret_cast<__m512bh>(splat_u(x[r])));
    }
  }
}

#else

using XWord = float;
constexpr bool HAS_DOT = false;

template <int ROWS, int VECS>
inline void multiply(F (&acc)[ROWS][VECS], const bf16* w, int64_t panel, const XWord* x, int64_t inputs) {
  const U upper = splat_u(UPPER);
  for (int64_t i = 0; i < inputs; i += 2, w += 2 * pd::PANEL, x += 2 * ROWS) {
    if (ROWS <= 2) {  // few multipliers: keep them, and touch each weight once
      PD_UNROLL for (int v = 0; v < VECS; ++v) {
        const U pair = load_u(w + (v / VECTORS) * panel + (v % VECTORS) * 2 * W);
        const F even = as_f(shift_left<16>(pair)), odd = as_f(bit_and(pair, upper));
        PD_UNROLL for (int r = 0; r < ROWS; ++r)
          {
          accumulate(&acc[r][v], even, splat(x[r]));
          accumulate(&acc[r][v], odd, splat(x[ROWS + r]));
        }
      }
      continue;
    }
    F part[VECS];
    PD_UNROLL for (int v = 0; v < VECS; ++v)
      part[v] = as_f(shift_left<16>(load_u(w + (v / VECTORS) * panel + (v % VECTORS) * 2 * W)));
    PD_UNROLL for (int r = 0; r < ROWS; ++r)
      PD_UNROLL for (int v = 0; v < VECS; ++v) accumulate(&acc[r][v], part[v], splat(x[r]));
    PD_UNROLL for (int v = 0; v < VECS; ++v)
      part[v] = as_f(bit_and(load_u(w + (v / VECTORS) * panel + (v % VECTORS) * 2 * W), upper));
    PD_UNROLL for (int r = 0; r < ROWS; ++r)
      PD_UNROLL for (int v = 0; v < VECS; ++v) accumulate(&acc[r][v], part[v], splat(x[ROWS + r]));
  }
}

#endif

template <int ROWS, int VECS>
inline void multiply(F (&acc)[ROWS][VECS], const float* w, int64_t panel, const float* x, int64_t inputs) {
  for (int64_t i = 0; i < inputs; ++i, w += pd::PANEL, x += ROWS) {
    F part[VECS];
    PD_UNROLL for (int v = 0; v < VECS; ++v) part[v] = load(w + (v / VECTORS) * panel + (v % VECTORS) * W);
    PD_UNROLL for (int r = 0; r < ROWS; ++r)
      PD_UNROLL for (int v = 0; v < VECS; ++v) accumulate(&acc[r][v], part[v], splat(x[r]));
  }
}

template <class T> struct XOf { using type = float; };
template <> struct XOf<bf16> { using type = XWord; };
template <class T> constexpr bool in_pairs() { return sizeof(T) == 2; }
// Words of laid-out x a row, and elements of a panel.
template <class T> inline int64_t even_inputs(int64_t inputs) { return in_pairs<T>() ? (inputs + 1) / 2 * 2 : inputs; }
template <class T> inline int64_t x_words(int64_t inputs) {
  return in_pairs<T>() && HAS_DOT ? even_inputs<T>(inputs) / 2 : even_inputs<T>(inputs);
}

// sums[rows][lanes] + bias to y, rounded. Apart from `block`, whose many versions would each repeat it.
template <class T>
__attribute__((noinline)) void finish(const pd::Linear& job, const float* sums, int64_t row, int64_t rows,
                                      int64_t first_output, int64_t lanes) {
  for (int64_t v = 0; v < lanes; v += W) {
    const int64_t output = first_output + v, left = job.outputs - output;
    if (left <= 0) break;
    const T* bias = static_cast<const T*>(job.bias) + output;
    const F offset = !job.bias ? zero() : left >= W ? load(bias) : load_some(bias, left);
    for (int64_t r = 0; r < rows; ++r) {
      T* y = static_cast<T*>(job.y) + (row + r) * job.outputs + output;
      F value = load(sums + r * lanes + v);
      if (job.bias) value = add(value, offset);
      if (left >= W) store(y, value);
      else store_some(y, value, left);
    }
  }
}

// Block of rows [row, row + ROWS) times panels [first_panel, first_panel + VECS / VECTORS).
template <class T, int ROWS, int VECS> void block(const pd::Linear& job, int64_t row, int64_t first_panel) {
  const int64_t panel = even_inputs<T>(job.inputs) * pd::PANEL;
  const auto* x = static_cast<const typename XOf<T>::type*>(job.scratch) + row * x_words<T>(job.inputs);
  F acc[ROWS][VECS];
  PD_UNROLL for (int r = 0; r < ROWS; ++r) PD_UNROLL for (int v = 0; v < VECS; ++v) acc[r][v] = zero();
  multiply(acc, static_cast<const T*>(job.panels) + first_panel * panel, panel, x, even_inputs<T>(job.inputs));
  alignas(64) float sums[ROWS][VECS * W];
  PD_UNROLL for (int r = 0; r < ROWS; ++r) PD_UNROLL for (int v = 0; v < VECS; ++v) store(&sums[r][v * W], acc[r][v]);
  finish<T>(job, &sums[0][0], row, ROWS, first_panel * pd::PANEL, VECS * W);
}

template <class T, int ROWS> void some_rows(const pd::Linear& job, int64_t row, int64_t panel, int64_t stop) {
  constexpr int VECS = vectors_for(ROWS);
  constexpr int STEP = VECS / VECTORS;
  for (; panel + STEP <= stop; panel += STEP) block<T, ROWS, VECS>(job, row, panel);
  for (; panel < stop; ++panel) block<T, ROWS, VECTORS>(job, row, panel);
}

template <class T> void rows_by_panels(const pd::Linear& job, int64_t row, int64_t rows, int64_t panel, int64_t stop) {
  switch (rows) {
    case 1: return some_rows<T, 1>(job, row, panel, stop);
    case 2: return some_rows<T, 2>(job, row, panel, stop);
    case 3: return some_rows<T, 3>(job, row, panel, stop);
    case 4: return some_rows<T, 4>(job, row, panel, stop);
    case 5: return some_rows<T, 5>(job, row, panel, stop);
    case 6: return some_rows<T, 6>(job, row, panel, stop);
#if defined(PD_AVX512) || defined(PD_AVX512BF16)
    case 7: return some_rows<T, 7>(job, row, panel, stop);
    case 8: return some_rows<T, 8>(job, row, panel, stop);
    case 9: return some_rows<T, 9>(job, row, panel, stop);
    case 10: return some_rows<T, 10>(job, row, panel, stop);
    case 11: return some_rows<T, 11>(job, row, panel, stop);
    case 12: return some_rows<T, 12>(job, row, panel, stop);
#endif
  }
}

inline float widen(float x) { return x; }
inline float widen(bf16 x) {
  const uint32_t word = static_cast<uint32_t>(x) << 16;
  float wide;
  memcpy(&wide, &word, 4);
  return wide;
}

// x of one block of rows, to [input][row]; the input that makes an odd number even is zero.
template <class T> void lay_out_x(const pd::Linear& job, int64_t row, int64_t rows) {
  using X = typename XOf<T>::type;
  X* to = static_cast<X*>(job.scratch) + row * x_words<T>(job.inputs);
  for (int64_t r = 0; r < rows; ++r) {
    const T* from = static_cast<const T*>(job.x) + (row + r) * job.x_stride;
    if constexpr (in_pairs<T>() && HAS_DOT) {
      for (int64_t i = 0; i + 1 < job.inputs; i += 2)
        to[i / 2 * rows + r] = from[i] | static_cast<uint32_t>(from[i + 1]) << 16;
      if (job.inputs % 2) to[job.inputs / 2 * rows + r] = from[job.inputs - 1];
    } else {
      for (int64_t i = 0; i < job.inputs; ++i) to[i * rows + r] = widen(from[i]);
      if (even_inputs<T>(job.inputs) > job.inputs) to[job.inputs * rows + r] = 0;
    }
  }
}

int64_t linear_scratch(int64_t rows, int64_t inputs) { return rows * (inputs + 1) * 4; }

// Rows in blocks of nearly one size, so that no block is so small that it cannot hide its latencies: 8 are 4 and 4.
inline int64_t num_blocks(int64_t rows) { return (rows + MAX_ROWS - 1) / MAX_ROWS; }
inline int64_t first_row(const pd::Linear& job, int64_t block) { return job.rows * block / num_blocks(job.rows); }

template <class T> void linear(const pd::Linear& job) {
  pd::parallel_for(
      num_blocks(job.rows), 4,
      [](const void* context, int64_t begin, int64_t end) {
        const auto& job = *static_cast<const pd::Linear*>(context);
        for (int64_t b = begin; b < end; ++b)
          lay_out_x<T>(job, first_row(job, b), first_row(job, b + 1) - first_row(job, b));
      },
      &job);
  pd::parallel_for(
      (job.outputs + pd::PANEL - 1) / pd::PANEL, 1,
      [](const void* context, int64_t begin, int64_t end) {
        const auto& job = *static_cast<const pd::Linear*>(context);
        const int64_t fitting = CHUNK_BYTES / (job.inputs * 4) / MAX_ROWS, chunk = fitting < 1 ? 1 : fitting;
        const int64_t blocks = num_blocks(job.rows);
        constexpr int64_t STEP = vectors_for(1) / VECTORS;
        for (int64_t start = 0; start < blocks; start += chunk) {
          const int64_t stop = start + chunk < blocks ? start + chunk : blocks;
          // A few panels at a time: read from memory by the first block of rows, from cache by the others.
          for (int64_t panel = begin; panel < end; panel += STEP) {
            const int64_t panel_stop = panel + STEP < end ? panel + STEP : end;
            for (int64_t b = start; b < stop; ++b)
              rows_by_panels<T>(job, first_row(job, b), first_row(job, b + 1) - first_row(job, b), panel, panel_stop);
          }
        }
      },
      &job);
}

}  // namespace
