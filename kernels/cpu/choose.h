// Choosing a token a row: the largest logit, or the race of pd/runtime/engine/noise.py, whose text defines the noise.
#pragma once

#include "ops.h"
#include "vec.h"

namespace {

template <class T> int64_t argmax_row(const T* x, int64_t size) {
  F top = splat(-INFINITY);
  int64_t i = 0;
  for (; i + W <= size; i += W) top = max(top, load(x + i));
  float best = largest(top);
  for (int64_t j = i; j < size; ++j) {
    const float value = widen(x[j]);
    best = value > best ? value : best;
  }
  for (int64_t j = 0; j + W <= size; j += W)
    if (const unsigned found = bits(equal(load(x + j), splat(best)))) return j + __builtin_ctz(found);
  for (int64_t j = i; j < size; ++j)
    if (widen(x[j]) == best) return j;
  return 0;
}

template <class T> void argmax(const pd::Choice& job) {
  pd::parallel_for(
      job.rows, 1,
      [](const void* context, int64_t begin, int64_t end) {
        const auto& job = *static_cast<const pd::Choice*>(context);
        for (int64_t row = begin; row < end; ++row)
          job.ids[row] = argmax_row(static_cast<const T*>(job.x) + row * job.stride, job.size);
      },
      &job);
}

constexpr unsigned ALL = (1u << W) - 1u;
constexpr float MAX_NOISE = 22.88f;  // no score exceeds its logit by more,
constexpr float MIN_NOISE = -2.82f;  // nor falls below it by more: -log(-log1p(-(1 - 2**-24)))

// Four words each of W calls: Philox4x32 with 7 rounds at counter (call, position, 0, 0).
inline void philox(U call, uint32_t position, uint64_t seed, U (&c)[4]) {
  c[0] = call;
  c[1] = splat_u(position);
  c[2] = c[3] = splat_u(0);
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  PD_UNROLL for (int round = 0; round < 7; ++round, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u) {
    U high0, low0, high1, low1;
    multiply_wide(c[0], splat_u(0xD2511F53u), &high0, &low0);
    multiply_wide(c[2], splat_u(0xCD9E8D57u), &high1, &low1);
    c[0] = bit_xor(bit_xor(high1, c[1]), splat_u(k0));
    c[1] = low1;
    c[2] = bit_xor(bit_xor(high0, c[3]), splat_u(k1));
    c[3] = low0;
  }
}

inline F uniform(U word) {
  return min(fma(unsigned_to_f(word), splat(0x1p-32f), splat(0x1p-33f)), splat(1.0f - 0x1p-24f));
}

// -log(-log1p(-u))
inline F noise(F u) {
  const F one = splat(1.0f);
  // log1p(-u) = log(y) - ((y - 1) + u) / y with y = 1 - u rounded: the second term is what the rounding lost.
  const F y = sub(one, u);
  const F lost = add(sub(y, one), u);
  const F time = sub(div(lost, y), log(y));
  return sub(zero(), log(time));
}

// At least noise(u): the time is at least u, which is at least 2 to its exponent. The hundredth covers all rounding.
inline F noise_limit(F u) {
  constexpr float LOG_2 = 0.69314718f;
  return fma(to_f(shift_right<23>(as_u(u))), splat(-LOG_2), splat(127 * LOG_2 + 0.01f));
}

struct Best {  // of each lane: its highest score, and the token that has it
  F score;
  U id;
};

// `leader`: a score already seen. Most tokens cannot reach it whatever their two logarithms come to.
inline void compare(Best* best, F logit, F floor, float leader, U word, U id) {
  const F u = uniform(word);
  if (bits(less(add(logit, noise_limit(u)), splat(leader))) == ALL) return;
  const F score = select(less(logit, floor), splat(-INFINITY), add(logit, noise(u)));
  const Mask higher = less(best->score, score);
  best->score = select(higher, score, best->score);
  best->id = select(higher, id, best->id);
}

inline int64_t winner(const Best& best) {
  alignas(64) float score[W];
  alignas(64) uint32_t id[W];
  store(score, best.score);
  store_u(id, best.id);
  int top = 0;
  for (int lane = 1; lane < W; ++lane)
    if (score[lane] > score[top] || (score[lane] == score[top] && id[lane] < id[top])) top = lane;
  return id[top];
}

int64_t race_row(const float* x, int64_t size, float floor, uint64_t seed, uint32_t position) {
  constexpr int64_t GROUP = 4 * W;  // tokens of W calls
  F top = splat(-INFINITY);
  int64_t i = 0;
  for (; i + W <= size; i += W) top = max(top, load(x + i));
  if (i < size) {
    alignas(64) float tail[W];
    for (int lane = 0; lane < W; ++lane) tail[lane] = i + lane < size ? x[i + lane] : -INFINITY;
    top = max(top, load(tail));
  }
  // Nothing below `hopeless` can win: the best logit's own score is at least its logit + MIN_NOISE.
  float hopeless = largest(top) + MIN_NOISE - MAX_NOISE;
  float leader = -INFINITY;
  Best best = {splat(-INFINITY), splat_u(0)};
  for (int64_t base = 0; base < size; base += GROUP) {
    alignas(64) float padded[GROUP];
    const float* group = x + base;
    if (base + GROUP > size) {
      for (int64_t j = 0; j < GROUP; ++j) padded[j] = base + j < size ? x[base + j] : -INFINITY;
      group = padded;
    }
    const float limit = floor > hopeless ? floor : hopeless;
    F most = load(group);
    for (int64_t j = W; j < GROUP; j += W) most = max(most, load(group + j));
    if (bits(less(most, splat(limit))) == ALL) continue;
    const U call = add(lane_numbers(), splat_u(static_cast<uint32_t>(base / 4)));
    U words[4];
    philox(call, position, seed, words);
    PD_UNROLL for (uint32_t j = 0; j < 4; ++j)
      compare(&best, every_fourth(group + j), splat(floor), leader, words[j], add(shift_left<2>(call), splat_u(j)));
    if (bits(less(splat(leader), best.score))) {
      leader = largest(best.score);
      hopeless = leader - MAX_NOISE > hopeless ? leader - MAX_NOISE : hopeless;
    }
  }
  return winner(best);
}

void race(const pd::Choice& job) {
  pd::parallel_for(
      job.rows, 1,
      [](const void* context, int64_t begin, int64_t end) {
        const auto& job = *static_cast<const pd::Choice*>(context);
        for (int64_t row = begin; row < end; ++row)
          job.ids[row] = race_row(static_cast<const float*>(job.x) + row * job.stride, job.size, job.floor[row],
                                  static_cast<uint64_t>(job.seed[row]), static_cast<uint32_t>(job.position[row]));
      },
      &job);
}

}  // namespace
