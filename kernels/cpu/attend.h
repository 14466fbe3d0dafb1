// One new token a request against its paged context: online softmax over fixed parts of the context.
//
// A part is up to some hundred tokens of one request (the caller cuts them at fixed token numbers, so that threads and
// batch cannot change a result) and one kv head, whose K and V are read once for all query heads that share it.
// Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018; merging of parts as in Flash-Decoding.
#pragma once

#include "ops.h"
#include "vec.h"

namespace {

constexpr int64_t TOKENS = 64;       // scored before their values are summed: 64 K and V rows of 64 bf16 fill 16 KB of L1
constexpr int SHARED = 4;            // query heads that share one pass over K or V
constexpr int64_t PARTIAL_HEAD = 2;  // floats: largest score, sum

// Floats of one head's weighted values: whole Twos.
inline int64_t padded(int64_t head_size) { return (head_size + 2 * W - 1) / (2 * W) * (2 * W); }
int64_t partial_size(int64_t head_size) { return PARTIAL_HEAD + padded(head_size); }

template <class T> inline Two two_of(const T* row, int64_t at, int64_t size) {
  return at + 2 * W <= size ? load_two(row + at) : load_two_some(row + at, size - at);
}

// A Two of floats kept in memory in the lane order of the type it was loaded as.
inline Two kept(const float* p) { return {load(p), load(p + W)}; }
inline void keep(float* p, Two x) {
  store(p, x.a);
  store(p + W, x.b);
}

template <class T> struct Rows {  // where the K or V rows of a block of tokens are
  const T* row[TOKENS];
};

template <class T>
inline void find_rows(const pd::Attention& job, int64_t request, int64_t kv_head, int64_t start, int64_t count,
                      Rows<T>* keys, Rows<T>* values) {
  const int32_t* table = job.table + request * job.table_row;
  for (int64_t t = 0; t < count; ++t) {
    const int64_t page = table[(start + t) / job.page_size], offset = (start + t) % job.page_size;
    keys->row[t] = static_cast<const T*>(job.k) + page * job.k_page + kv_head * job.k_head + offset * job.k_token;
    values->row[t] = static_cast<const T*>(job.v) + page * job.v_page + kv_head * job.v_head + offset * job.v_token;
  }
}

template <class T, int HEADS>
inline void score(const Rows<T>& keys, const Rows<T>& values, int64_t count, int64_t size, const float* q,
                  float (*scores)[TOKENS]) {
  const int64_t q_size = padded(size);
  const int64_t row_bytes = size * static_cast<int64_t>(sizeof(T));
  for (int64_t t = 0; t < count; ++t) {
    const char* value = reinterpret_cast<const char*>(values.row[t]);
    for (int64_t byte = 0; byte < row_bytes; byte += 64) _mm_prefetch(value + byte, _MM_HINT_T0);
    F dot[HEADS];
    for (int h = 0; h < HEADS; ++h) dot[h] = zero();
    for (int64_t e = 0; e < size; e += 2 * W) {
      const Two key = two_of(keys.row[t], e, size);
      for (int h = 0; h < HEADS; ++h) {
        dot[h] = fma(key.a, load(q + h * q_size + e), dot[h]);
        dot[h] = fma(key.b, load(q + h * q_size + e + W), dot[h]);
      }
    }
    for (int h = 0; h < HEADS; ++h) scores[h][t] = sum(dot[h]);
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

template <class T, int HEADS>
inline void add_values(const Rows<T>& values, int64_t count, int64_t size, const float (*weights)[TOKENS],
                       const float* factor, float* sums, int64_t sums_stride) {
  for (int64_t e = 0; e < size; e += 2 * W) {
    Two acc[HEADS];
    for (int h = 0; h < HEADS; ++h) {
      const Two old = kept(sums + h * sums_stride + e);
      acc[h] = {mul(old.a, splat(factor[h])), mul(old.b, splat(factor[h]))};
    }
    for (int64_t t = 0; t < count; ++t) {
      const Two value = two_of(values.row[t], e, size);
      for (int h = 0; h < HEADS; ++h) {
        const F weight = splat(weights[h][t]);
        acc[h] = {fma(value.a, weight, acc[h].a), fma(value.b, weight, acc[h].b)};
      }
    }
    for (int h = 0; h < HEADS; ++h) keep(sums + h * sums_stride + e, acc[h]);
  }
}

template <class T, int HEADS>
void attend_heads(const pd::Attention& job, int64_t part, int64_t kv_head, const int32_t* heads) {
  const int64_t size = job.head_size, request = job.part_row[part];
  alignas(64) float q[HEADS * 512];
  alignas(64) float scores[HEADS][TOKENS];
  alignas(64) float sums[HEADS * 512];
  float state[HEADS][2], factor[HEADS];
  for (int h = 0; h < HEADS; ++h) {
    const T* from = static_cast<const T*>(job.q) + request * job.q_row + heads[h] * job.q_head;
    for (int64_t e = 0; e < size; e += 2 * W) {
      const Two x = two_of(from, e, size);
      keep(q + h * padded(size) + e, {mul(x.a, splat(job.scale)), mul(x.b, splat(job.scale))});
      keep(sums + h * padded(size) + e, {zero(), zero()});
    }
    state[h][0] = -INFINITY;
    state[h][1] = 0;
  }
  Rows<T> keys, values;
  for (int64_t start = job.part_start[part]; start < job.part_stop[part]; start += TOKENS) {
    const int64_t left = job.part_stop[part] - start, count = left < TOKENS ? left : TOKENS;
    find_rows<T>(job, request, kv_head, start, count, &keys, &values);
    score<T, HEADS>(keys, values, count, size, q, scores);
    for (int h = 0; h < HEADS; ++h) factor[h] = soften(scores[h], count, state[h]);
    add_values<T, HEADS>(values, count, size, scores, factor, sums, padded(size));
  }
  for (int h = 0; h < HEADS; ++h) {
    float* partial = job.partial + (part * job.heads + heads[h]) * job.partial_size;
    memcpy(partial, state[h], sizeof state[h]);
    memcpy(partial + PARTIAL_HEAD, sums + h * padded(size), static_cast<size_t>(padded(size)) * sizeof(float));
  }
}

template <class T> void attend_part(const pd::Attention& job, int64_t part, int64_t kv_head) {
  int64_t at = job.group_start[kv_head];
  const int64_t stop = job.group_start[kv_head + 1];
  for (; at + SHARED <= stop; at += SHARED) attend_heads<T, SHARED>(job, part, kv_head, job.group_heads + at);
  switch (stop - at) {
    case 3: return attend_heads<T, 3>(job, part, kv_head, job.group_heads + at);
    case 2: return attend_heads<T, 2>(job, part, kv_head, job.group_heads + at);
    case 1: return attend_heads<T, 1>(job, part, kv_head, job.group_heads + at);
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
