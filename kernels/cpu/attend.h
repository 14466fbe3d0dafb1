// One new token a request against its paged context: online softmax over fixed parts of the context.
//
// A part is up to PART tokens of one request and one kv head, whose K and V are read once for all query heads that share
// it. Parts end at whole PARTs of the context and blocks at whole BLOCKs, parts are folded in their order: so neither
// threads nor batch change a result, and attend_many.h can give the same bits to a token that comes in a chunk.
// Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018; parts as in Flash-Decoding.
#pragma once

#include "ops.h"
#include "vec.h"

namespace {

constexpr int64_t BLOCK = 64;        // tokens scored before their values are summed: K and V in bf16 fill 16 KB of L1
constexpr int SHARED = 4;            // query heads that share one pass over K or V
constexpr int64_t PARTIAL_HEAD = 2;  // floats: largest score, sum
using pd::MAX_HEAD_SIZE;

// Floats of one head's weighted values: whole Twos.
inline int64_t padded(int64_t head_size) { return (head_size + 2 * W - 1) / (2 * W) * (2 * W); }
int64_t partial_size(int64_t head_size) { return PARTIAL_HEAD + padded(head_size); }

// WHOLE: a row of K or V is whole Twos, so none needs its end handled.
template <bool WHOLE, class T> inline Two two_of(const T* row, int64_t at, int64_t size) {
  return WHOLE || at + 2 * W <= size ? load_two(row + at) : load_two_some(row + at, size - at);
}

// A Two of floats kept in memory in the lane order of the type it was loaded as.
inline Two kept(const float* p) { return {load(p), load(p + W)}; }
inline void keep(float* p, Two x) {
  store(p, x.a);
  store(p + W, x.b);
}

template <bool WHOLE, class T> inline void keep_scaled(const T* from, int64_t size, float scale, float* to) {
  for (int64_t e = 0; e < size; e += 2 * W) {
    const Two x = two_of<WHOLE>(from, e, size);
    keep(to + e, {mul(x.a, splat(scale)), mul(x.b, splat(scale))});
  }
}

// Of one head: state is its largest score and the sum of its weights, `sums` its weighted values.
inline void begin(float* state, float* sums, int64_t stride) {
  state[0] = -INFINITY;
  state[1] = 0;
  memset(sums, 0, static_cast<size_t>(stride) * sizeof(float));
}

template <class T> struct Rows {  // where the K and V rows of a block of tokens are
  const T* key[BLOCK];
  const T* value[BLOCK];
  int64_t count = 0;
};

// Tokens [start, stop) of a request, no further than start's block.
template <class T>
inline void find_rows(const pd::Paged& pool, const int32_t* table, int64_t kv_head, int64_t start, int64_t stop,
                      Rows<T>* rows) {
  const int64_t end = (start / BLOCK + 1) * BLOCK;
  rows->count = start >= stop ? 0 : (stop < end ? stop : end) - start;
  if (rows->count == 0) return;
  const int32_t* page = table + start / pool.page_size;
  int64_t offset = start % pool.page_size;
  for (int64_t t = 0; t < rows->count; ++page, offset = 0) {
    const T* key = static_cast<const T*>(pool.k) + *page * pool.k_page + kv_head * pool.k_head;
    const T* value = static_cast<const T*>(pool.v) + *page * pool.v_page + kv_head * pool.v_head;
    for (; offset < pool.page_size && t < rows->count; ++offset, ++t) {
      rows->key[t] = key + offset * pool.k_token;
      rows->value[t] = value + offset * pool.v_token;
    }
  }
  for (int64_t t = rows->count; t % 4 != 0; ++t) {  // keys are scored in fours; the scores beyond count go unread
    rows->key[t] = rows->key[t - 1];
    rows->value[t] = rows->value[t - 1];
  }
}

template <class T> inline void fetch(const T* row, int64_t size) {
  for (int64_t e = 0; e < size; e += 64 / static_cast<int64_t>(sizeof(T)))
    _mm_prefetch(reinterpret_cast<const char*>(row + e), _MM_HINT_T0);
}

// Pages lie anywhere, so the hardware cannot foresee them: while keys are scored their values are fetched, and while
// values are summed the next block's keys are.
template <class T, int HEADS, bool WHOLE>
inline void score(const T* const* keys, const T* const* values, int64_t count, int64_t size, const float* q,
                  float (*scores)[BLOCK]) {
  constexpr int ROUND = HEADS == 4 && REGISTERS == 16 ? 2 : HEADS;  // heads whose four sums fit the registers
  const int64_t stride = padded(size);
  for (int64_t t = 0; t < count; t += 4) {
    for (int i = 0; values && i < 4; ++i) fetch(values[t + i], size);
    for (int first = 0; first < HEADS; first += ROUND) {
      F dot[ROUND][4];
      PD_UNROLL for (int h = 0; h < ROUND; ++h) PD_UNROLL for (int i = 0; i < 4; ++i) dot[h][i] = zero();
      for (int64_t e = 0; e < size; e += 2 * W) {
        PD_UNROLL for (int i = 0; i < 4; ++i) {
          const Two key = two_of<WHOLE>(keys[t + i], e, size);
          PD_UNROLL for (int h = 0; h < ROUND; ++h) {
            const float* factor = q + (first + h) * stride + e;
            dot[h][i] = fma(key.b, load(factor + W), fma(key.a, load(factor), dot[h][i]));
          }
        }
      }
      PD_UNROLL for (int h = 0; h < ROUND; ++h) sum_four(dot[h], scores[first + h] + t);
    }
  }
}

// scores -> weights e**(score - largest), and what the sums so far are to be multiplied with.
inline float soften(float* scores, int64_t count, float* partial) {
  const int64_t whole = (count + W - 1) / W * W;
  for (int64_t t = count; t < whole; ++t) scores[t] = -INFINITY;
  F top = splat(partial[0]);
  for (int64_t t = 0; t < whole; t += W) top = max(top, load(scores + t));
  const float before = partial[0], now = largest(top);
  F total = zero();
  for (int64_t t = 0; t < whole; t += W) {
    const F weight = exp(sub(load(scores + t), splat(now)));
    store(scores + t, weight);
    total = add(total, weight);
  }
  for (int64_t t = count; t < whole; ++t) scores[t] = 0;
  alignas(64) float shrink[W];
  store(shrink, exp(splat(before - now)));
  const float factor = before == -INFINITY ? 0 : shrink[0];
  partial[0] = now;
  partial[1] = partial[1] * factor + sum(total);
  return factor;
}

// Elements [e, e + TWOS * 2 W) of the weighted sums.
template <class T, int HEADS, int TWOS, bool WHOLE>
inline void add_columns(const T* const* values, int64_t count, int64_t e, int64_t size,
                        const float (*weights)[BLOCK], const float* factor, float* sums) {
  const int64_t stride = padded(size);
  Two acc[HEADS][TWOS];
  PD_UNROLL for (int h = 0; h < HEADS; ++h) PD_UNROLL for (int c = 0; c < TWOS; ++c) {
    const Two old = kept(sums + h * stride + e + c * 2 * W);
    acc[h][c] = {mul(old.a, splat(factor[h])), mul(old.b, splat(factor[h]))};
  }
  for (int64_t t = 0; t < count; ++t) {
    PD_UNROLL for (int c = 0; c < TWOS; ++c) {
      const Two value = two_of<WHOLE>(values[t], e + c * 2 * W, size);
      PD_UNROLL for (int h = 0; h < HEADS; ++h) {
        const F weight = splat(weights[h][t]);
        acc[h][c] = {fma(value.a, weight, acc[h][c].a), fma(value.b, weight, acc[h][c].b)};
      }
    }
  }
  PD_UNROLL for (int h = 0; h < HEADS; ++h) PD_UNROLL for (int c = 0; c < TWOS; ++c)
    keep(sums + h * stride + e + c * 2 * W, acc[h][c]);
}

template <class T, int HEADS, bool WHOLE>
inline void add_values(const T* const* values, int64_t count, int64_t size, const float (*weights)[BLOCK],
                       const float* factor, float* sums) {
  const int64_t stride = padded(size);
  int64_t e = 0;
  for (; HEADS < 3 && e + 4 * W <= stride; e += 4 * W)
    add_columns<T, HEADS, 2, WHOLE>(values, count, e, size, weights, factor, sums);
  for (; e < size; e += 2 * W) add_columns<T, HEADS, 1, WHOLE>(values, count, e, size, weights, factor, sums);
}

template <class T, int HEADS, bool WHOLE>
void attend_heads(const pd::Attention& job, int64_t part, int64_t kv_head, const int32_t* heads) {
  const int64_t size = job.head_size, stride = padded(size);
  alignas(64) float q[HEADS * MAX_HEAD_SIZE];
  alignas(64) float sums[HEADS * MAX_HEAD_SIZE];
  alignas(64) float scores[HEADS][BLOCK];
  float state[HEADS][PARTIAL_HEAD], factor[HEADS];
  for (int h = 0; h < HEADS; ++h) {
    const T* from = static_cast<const T*>(job.q) + job.part_row[part] * job.q_row + heads[h] * job.q_head;
    keep_scaled<WHOLE>(from, size, job.scale, q + h * stride);
    begin(state[h], sums + h * stride, stride);
  }
  Rows<T> blocks[2];
  Rows<T>*rows = &blocks[0], *next = &blocks[1];
  const int32_t* table = job.table + job.part_row[part] * job.table_row;
  const int64_t stop = job.part_stop[part];
  int64_t start = job.part_start[part];
  for (find_rows(job.pool, table, kv_head, start, stop, rows); rows->count > 0;) {
    start += rows->count;
    find_rows(job.pool, table, kv_head, start, stop, next);
    score<T, HEADS, WHOLE>(rows->key, rows->value, rows->count, size, q, scores);
    for (int h = 0; h < HEADS; ++h) factor[h] = soften(scores[h], rows->count, state[h]);
    for (int64_t t = 0; t < next->count; ++t) fetch(next->key[t], size);
    add_values<T, HEADS, WHOLE>(rows->value, rows->count, size, scores, factor, sums);
    Rows<T>* const done = rows;
    rows = next;
    next = done;
  }
  for (int h = 0; h < HEADS; ++h) {
    float* partial = job.partial + (part * job.heads + heads[h]) * job.partial_size;
    memcpy(partial, state[h], sizeof state[h]);
    memcpy(partial + PARTIAL_HEAD, sums + h * stride, static_cast<size_t>(stride) * sizeof(float));
  }
}

template <class T, int HEADS> void attend_some(const pd::Attention& job, int64_t part, int64_t kv_head, int64_t at) {
  if (job.head_size % (2 * W) == 0) attend_heads<T, HEADS, true>(job, part, kv_head, job.group_heads + at);
  else attend_heads<T, HEADS, false>(job, part, kv_head, job.group_heads + at);
}

template <class T> void attend_part(const pd::Attention& job, int64_t part, int64_t kv_head) {
  int64_t at = job.group_start[kv_head];
  const int64_t stop = job.group_start[kv_head + 1];
  for (; at + SHARED <= stop; at += SHARED) attend_some<T, SHARED>(job, part, kv_head, at);
  switch (stop - at) {
    case 3: return attend_some<T, 3>(job, part, kv_head, at);
    case 2: return attend_some<T, 2>(job, part, kv_head, at);
    case 1: return attend_some<T, 1>(job, part, kv_head, at);
  }
}

// What part of the context gave, into what those before it gave. Their order decides the last bits: it is the context's.
inline void fold(float* state, float* sums, const float* part_state, const float* part_sums, int64_t stride) {
  if (state[0] == -INFINITY) {
    memcpy(state, part_state, PARTIAL_HEAD * sizeof(float));
    memcpy(sums, part_sums, static_cast<size_t>(stride) * sizeof(float));
    return;
  }
  const float top = state[0] > part_state[0] ? state[0] : part_state[0];
  const F mine = exp(splat(state[0] - top)), other = exp(splat(part_state[0] - top));
  alignas(64) float factor[2][W];
  store(factor[0], mine);
  store(factor[1], other);
  state[0] = top;
  state[1] = state[1] * factor[0][0] + part_state[1] * factor[1][0];
  for (int64_t e = 0; e < stride; e += W) store(sums + e, fma(load(part_sums + e), other, mul(load(sums + e), mine)));
}

template <class T> inline void finish_head(const float* state, const float* sums, int64_t size, T* out) {
  const F inverse = splat(state[1] > 0 ? 1 / state[1] : 0);
  for (int64_t e = 0; e < size; e += 2 * W) {
    Two x = kept(sums + e);
    x = {mul(x.a, inverse), mul(x.b, inverse)};
    if (e + 2 * W <= size) store_two(out + e, x);
    else store_two_some(out + e, x, size - e);
  }
}

// One request's head from its parts.
template <class T> void merge(const pd::Attention& job, int64_t row, int64_t head) {
  T* out = static_cast<T*>(job.out) + (row * job.heads + head) * job.head_size;
  const int64_t first = job.row_parts[row], stop = job.row_parts[row + 1];
  if (first == stop) {
    memset(out, 0, static_cast<size_t>(job.head_size) * sizeof(T));
    return;
  }
  const auto partial = [&](int64_t part) { return job.partial + (part * job.heads + head) * job.partial_size; };
  float *state = partial(first), *sums = state + PARTIAL_HEAD;
  for (int64_t part = first + 1; part < stop; ++part)
    fold(state, sums, partial(part), partial(part) + PARTIAL_HEAD, padded(job.head_size));
  finish_head(state, sums, job.head_size, out);
}

template <class T> void attend(const pd::Attention& job) {
  pd::parallel_for(
      job.num_parts * job.kv_heads, 1,
      [](const void* context, int64_t begin, int64_t end) {
        const auto& job = *static_cast<const pd::Attention*>(context);
        for (int64_t i = begin; i < end; ++i) attend_part<T>(job, i / job.kv_heads, i % job.kv_heads);
      },
      &job);
  pd::parallel_for(
      job.rows * job.heads, 64,
      [](const void* context, int64_t begin, int64_t end) {
        const auto& job = *static_cast<const pd::Attention*>(context);
        for (int64_t i = begin; i < end; ++i) merge<T>(job, i / job.heads, i % job.heads);
      },
      &job);
}

}  // namespace
