// Chunks of several new tokens a request, each causally attending to its paged context.
//
// A row goes through the blocks and parts of attend.h with its arithmetic and in its order: a token has the same bits
// whether it comes alone or in a chunk, however a prompt is cut. What is shared is the reading: a block of K and V is
// widened once for a tile of rows, and stays in the first-level cache while they use it.
#pragma once

#include "attend.h"

namespace {

using pd::TILE_ROWS;

// HEADS query heads of one kv head, of a tile's rows.
template <int HEADS> struct Tile {
  static constexpr int64_t MOST = TILE_ROWS * HEADS * MAX_HEAD_SIZE;

  alignas(64) float q[MOST];     // [row][head][stride], as all of them
  alignas(64) float sums[MOST];  // of the part in progress
  alignas(64) float done[MOST];  // of the parts before it
  alignas(64) float scores[TILE_ROWS][HEADS][BLOCK];
  float state[TILE_ROWS][HEADS][PARTIAL_HEAD], done_state[TILE_ROWS][HEADS][PARTIAL_HEAD];
  alignas(64) float keys[(BLOCK + 3) * MAX_HEAD_SIZE];  // of a block; scoring in fours reads beyond its end
  alignas(64) float values[BLOCK * MAX_HEAD_SIZE];
  const float* key[BLOCK + 3];
  const float* value[BLOCK];
  int64_t position, rows, window, size, stride;

  int64_t stop_of(int64_t row) const { return position + row + 1; }
  int64_t start_of(int64_t row) const { return window > 0 && stop_of(row) > window ? stop_of(row) - window : 0; }
  int64_t at(int64_t row, int h) const { return (row * HEADS + h) * stride; }

  template <class T> void open(const pd::Chunks& job, int64_t tile, const int32_t* heads) {
    const int64_t first = job.tile_row[tile];
    position = first + job.ahead[job.tile_chunk[tile]];
    rows = job.tile_stop[tile] - first;
    window = job.window;
    size = job.head_size;
    stride = padded(size);
    for (int64_t t = 0; t < BLOCK + 3; ++t) key[t] = keys + t * stride;
    for (int64_t t = 0; t < BLOCK; ++t) value[t] = values + t * stride;
    memset(keys, 0, static_cast<size_t>((BLOCK + 3) * stride) * sizeof(float));
    for (int64_t r = 0; r < rows; ++r)
      for (int h = 0; h < HEADS; ++h) {
        const T* from = static_cast<const T*>(job.q) + (first + r) * job.q_row + heads[h] * job.q_head;
        keep_scaled<false>(from, size, job.scale, q + at(r, h));
        begin(state[r][h], sums + at(r, h), stride);
        begin(done_state[r][h], done + at(r, h), stride);
      }
  }

  template <class T> void widen(const Rows<T>& block) {
    for (int64_t t = 0; t < block.count; ++t)
      for (int64_t e = 0; e < size; e += 2 * W) {
        keep(keys + t * stride + e, two_of<false>(block.key[t], e, size));
        keep(values + t * stride + e, two_of<false>(block.value[t], e, size));
      }
  }

  // Tokens [start, stop), whose K and V were widened, for the rows that see some of them.
  void attend(int64_t start, int64_t stop) {
    int64_t low[TILE_ROWS], count[TILE_ROWS];
    for (int64_t r = 0; r < rows; ++r) {
      low[r] = start_of(r) > start ? start_of(r) - start : 0;
      count[r] = (stop_of(r) < stop ? stop_of(r) : stop) - start - low[r];
      if (count[r] > 0) score<float, HEADS, true>(key + low[r], nullptr, count[r], stride, q + at(r, 0), scores[r]);
    }
    for (int64_t r = 0; r < rows; ++r) {
      if (count[r] <= 0) continue;
      float factor[HEADS];
      for (int h = 0; h < HEADS; ++h) factor[h] = soften(scores[r][h], count[r], state[r][h]);
      add_values<float, HEADS, true>(value + low[r], count[r], stride, scores[r], factor, sums + at(r, 0));
    }
  }

  void end_part() {
    for (int64_t r = 0; r < rows; ++r)
      for (int h = 0; h < HEADS; ++h) {
        if (state[r][h][0] == -INFINITY) continue;
        fold(done_state[r][h], done + at(r, h), state[r][h], sums + at(r, h), stride);
        begin(state[r][h], sums + at(r, h), stride);
      }
  }
};

template <class T, int HEADS> void tile_heads(const pd::Chunks& job, int64_t index, int64_t kv_head, const int32_t* heads) {
  Tile<HEADS> tile;
  tile.template open<T>(job, index, heads);
  const int32_t* table = job.table + job.tile_chunk[index] * job.table_row;
  const int64_t stop = tile.stop_of(tile.rows - 1);
  Rows<T> block;
  for (int64_t start = tile.start_of(0); start < stop; start += block.count) {
    if (start % pd::PART == 0) tile.end_part();
    find_rows(job.pool, table, kv_head, start, stop, &block);
    tile.widen(block);
    tile.attend(start, start + block.count);
  }
  tile.end_part();
  for (int64_t r = 0; r < tile.rows; ++r)
    for (int h = 0; h < HEADS; ++h) {
      T* out = static_cast<T*>(job.out) + ((job.tile_row[index] + r) * job.heads + heads[h]) * job.head_size;
      finish_head(tile.done_state[r][h], tile.done + tile.at(r, h), job.head_size, out);
    }
}

template <class T> void attend_tile(const pd::Chunks& job, int64_t tile, int64_t kv_head) {
  int64_t at = job.group_start[kv_head];
  const int64_t stop = job.group_start[kv_head + 1];
  for (; at + SHARED <= stop; at += SHARED) tile_heads<T, SHARED>(job, tile, kv_head, job.group_heads + at);
  switch (stop - at) {
    case 3: return tile_heads<T, 3>(job, tile, kv_head, job.group_heads + at);
    case 2: return tile_heads<T, 2>(job, tile, kv_head, job.group_heads + at);
    case 1: return tile_heads<T, 1>(job, tile, kv_head, job.group_heads + at);
  }
}

// Later tiles of a chunk see more: the first with the last, the second with the last but one, so that every run of them
// is about as much work as any other.
inline int64_t balanced(int64_t i, int64_t size) { return i % 2 == 0 ? i / 2 : size - 1 - i / 2; }

template <class T> void attend_many(const pd::Chunks& job) {
  pd::parallel_for(
      job.num_tiles * job.kv_heads, 1,
      [](const void* context, int64_t begin, int64_t end) {
        const auto& job = *static_cast<const pd::Chunks*>(context);
        for (int64_t i = begin; i < end; ++i)
          attend_tile<T>(job, balanced(i % job.num_tiles, job.num_tiles), i / job.num_tiles);
      },
      &job);
}

}  // namespace
