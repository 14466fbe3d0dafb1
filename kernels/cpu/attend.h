// One new token a request against its paged context: online softmax over fixed parts of the context.
//
// A part is up to some hundred tokens of one request (the caller cuts them at fixed token numbers, so that threads and
// batch cannot change a result) and one kv head, whose K and V are read once for all query heads that share it.
// Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018; merging of parts as in Flash-Decoding.
#pragma once

#include "ops.h"
#include "vec.h"

namespace {

constexpr int64_t TOKENS = 64;       // scored before their values are summed: K and V of 64 bf16 each fill 16 KB of L1
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

template <class T> struct Rows {  // where the K and V rows of a block of tokens are
  const T* key[TOKENS];
  const T* value[TOKENS];
  int64_t count = 0;
};

template <class T>
inline void find_rows(const pd::Attention& job, int64_t part, int64_t kv_head, int64_t start, Rows<T>* rows) {
  const int64_t left = job.part_stop[part] - start;
  rows->count = left < 0 ? 0 : left < TOKENS ? left : TOKENS;
  if (rows->count == 0) return;
  const int32_t* page = job.table + job.part_row[part] * job.table_row + start / job.page_size;
  int64_t offset = start % job.page_size;
  for (int64_t t = 0; t < rows->count; ++page, offset = 0) {
    const T* key = static_cast<const T*>(job.k) + *page * job.k_page + kv_head * job.k_head;
    const T* value = static_cast<const T*>(job.v) + *page * job.v_page + kv_head * job.v_head;
    for (; offset < job.page_size && t < rows->count; ++offset, ++t) {
      rows->key[t] = key + offset * job.k_token;
      rows->value[t] = value + offset * job.v_token;
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
inline void score(const Rows<T>& rows, int64_t size, const float* q, float (*scores)[TOKENS]) {
  constexpr int ROUND = HEADS == 4 && REGISTERS == 16 ? 2 : HEADS;  // heads whose four sums fit the registers
  const int64_t stride = padded(size);
  for (int64_t t = 0; t < rows.count; t += 4) {
    for (int i = 0; i < 4; ++i) fetch(rows.value[t + i], size);
    for (int first = 0; first < HEADS; first += ROUND) {
      F dot[ROUND][4];
      PD_UNROLL for (int h = 0; h < ROUND; ++h) PD_UNROLL for (int i = 0; i < 4; ++i) dot[h][i] = zero();
      for (int64_t e = 0; e < size; e += 2 * W) {
        PD_UNROLL for (int i = 0; i < 4; ++i) {
          const Two key = two_of<WHOLE>(rows.key[t + i], e, size);
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
inline void add_columns(const Rows<T>& rows, int64_t e, int64_t size, const float (*weights)[TOKENS],
                        const float* factor, float* sums) {
  const int64_t stride = padded(size);
  Two acc[HEADS][TWOS];
  PD_UNROLL for (int h = 0; h < HEADS; ++h) PD_UNROLL for (int c = 0; c < TWOS; ++c) {
    const Two old = kept(sums + h * stride + e + c * 2 * W);
    acc[h][c] = {mul(old.a, splat(factor[h])), mul(old.b, splat(factor[h]))};
  }
  for (int64_t t = 0; t < rows.count; ++t) {
    PD_UNROLL for (int c = 0; c < TWOS; ++c) {
      const Two value = two_of<WHOLE>(rows.value[t], e + c * 2 * W, size);
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
inline void add_values(const Rows<T>& rows, const Rows<T>& next, int64_t size, const float (*weights)[TOKENS],
                       const float* factor, float* sums) {
  const int64_t stride = padded(size);
  for (int64_t t = 0; t < next.count; ++t) fetch(next.key[t], size);
  int64_t e = 0;
  for (; HEADS < 3 && e + 4 * W <= stride; e += 4 * W)
    add_columns<T, HEADS, 2, WHOLE>(rows, e, size, weights, factor, sums);
  for (; e < size; e += 2 * W) add_columns<T, HEADS, 1, WHOLE>(rows, e, size, weights, factor, sums);
}

template <class T, int HEADS, bool WHOLE>
void attend_heads(const pd::Attention& job, int64_t part, int64_t kv_head, const int32_t* heads) {
  const int64_t size = job.head_size, stride = padded(size);
  alignas(64) float q[HEADS * MAX_HEAD_SIZE];
  alignas(64) float sums[HEADS * MAX_HEAD_SIZE];
  alignas(64) float scores[HEADS][TOKENS];
  float state[HEADS][PARTIAL_HEAD], factor[HEADS];
  for (int h = 0; h < HEADS; ++h) {
    const T* from = static_cast<const T*>(job.q) + job.part_row[part] * job.q_row + heads[h] * job.q_head;
    for (int64_t e = 0; e < size; e += 2 * W) {
      const Two x = two_of<WHOLE>(from, e, size);
      keep(q + h * stride + e, {mul(x.a, splat(job.scale)), mul(x.b, splat(job.scale))});
      keep(sums + h * stride + e, {zero(), zero()});
    }
    state[h][0] = -INFINITY;
    state[h][1] = 0;
  }
  Rows<T> blocks[2];
  Rows<T>*rows = &blocks[0], *next = &blocks[1];
  int64_t start = job.part_start[part];
  for (find_rows(job, part, kv_head, start, rows); rows->count > 0; start += TOKENS) {
    find_rows(job, part, kv_head, start + TOKENS, next);
    score<T, HEADS, WHOLE>(*rows, size, q, scores);
    for (int h = 0; h < HEADS; ++h) factor[h] = soften(scores[h], rows->count, state[h]);
    add_values<T, HEADS, WHOLE>(*rows, *next, size, scores, factor, sums);
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

// One request's head from its parts, in their order.
template <class T> void merge(const pd::Attention& job, int64_t row, int64_t head) {
  T* out = static_cast<T*>(job.out) + (row * job.heads + head) * job.head_size;
  const int64_t first = job.row_parts[row], stop = job.row_parts[row + 1];
  const auto partial = [&](int64_t part) { return job.partial + (part * job.heads + head) * job.partial_size; };
  float top = -INFINITY;
  for (int64_t part = first; part < stop; ++part) top = partial(part)[0] > top ? partial(part)[0] : top;
  float total = 0;
  for (int64_t part = first; part < stop; ++part) {
    float* p = partial(part);
    alignas(64) float weight[W];
    store(weight, exp(splat(p[0] - top)));
    p[0] = weight[0];
    total += p[0] * p[1];
  }
  const F inverse = splat(total > 0 ? 1 / total : 0);
  for (int64_t e = 0; e < job.head_size; e += 2 * W) {
    Two acc = {zero(), zero()};
    for (int64_t part = first; part < stop; ++part) {
      const Two x = kept(partial(part) + PARTIAL_HEAD + e);
      const F weight = splat(partial(part)[0]);
      acc = {fma(x.a, weight, acc.a), fma(x.b, weight, acc.b)};
    }
    acc = {mul(acc.a, inverse), mul(acc.b, inverse)};
    if (e + 2 * W <= job.head_size) store_two(out + e, acc);
    else store_two_some(out + e, acc, job.head_size - e);
  }
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
