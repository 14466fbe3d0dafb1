// What the binding checks of attention's arguments, and how it cuts their work.
#pragma once

#include <algorithm>
#include <tuple>
#include <vector>

#include "ops.h"
#include "tensors.h"

namespace pd {
namespace {

struct Parts {
  std::vector<int32_t> row;
  std::vector<int64_t> start, stop, of_row;
};

Parts cut(const int32_t* lengths, int64_t rows, int64_t window) {
  Parts parts;
  parts.of_row.push_back(0);
  for (int64_t b = 0; b < rows; ++b) {
    int64_t start = window > 0 && lengths[b] > window ? lengths[b] - window : 0;
    while (start < lengths[b]) {
      const int64_t stop = std::min<int64_t>(lengths[b], (start / PART + 1) * PART);
      parts.row.push_back(static_cast<int32_t>(b));
      parts.start.push_back(start);
      parts.stop.push_back(stop);
      start = stop;
    }
    parts.of_row.push_back(static_cast<int64_t>(parts.row.size()));
  }
  return parts;
}

struct Groups {
  std::vector<int32_t> heads, start;
};

Groups group(const int32_t* kv_head_of, int64_t heads, int64_t kv_heads) {
  Groups groups;
  for (int64_t h = 0; h < heads; ++h)
    TORCH_CHECK(kv_head_of[h] >= 0 && kv_head_of[h] < kv_heads, "query head ", h, " reads kv head ", kv_head_of[h],
                " of ", kv_heads);
  for (int64_t kv = 0; kv <= kv_heads; ++kv) {
    groups.start.push_back(static_cast<int32_t>(groups.heads.size()));
    for (int64_t h = 0; h < heads; ++h)
      if (kv_head_of[h] == kv) groups.heads.push_back(static_cast<int32_t>(h));
  }
  return groups;
}

void check_context(const Tensor& table, const Tensor& lengths, int64_t rows, const Tensor& pool) {
  check_dense(lengths, at::kInt, "lengths");
  TORCH_CHECK(table.device().is_cpu() && table.scalar_type() == at::kInt && table.dim() == 2 &&
                  (table.size(1) <= 1 || table.stride(1) == 1),
              "table must be int32 rows on the CPU");
  TORCH_CHECK(table.size(0) >= rows && lengths.size(0) == rows, "table ", table.sizes(), " and lengths ",
              lengths.sizes(), " for ", rows, " requests");
  const int64_t num_pages = pool.size(0), page_size = pool.size(2);
  const int32_t* length = lengths.const_data_ptr<int32_t>();
  for (int64_t b = 0; b < rows; ++b) {
    const int64_t used = (length[b] + page_size - 1) / page_size;
    TORCH_CHECK(length[b] >= 0 && used <= table.size(1), "request ", b, " of ", length[b], " tokens needs ", used,
                " pages, its table has ", table.size(1));
    const int32_t* pages = table.const_data_ptr<int32_t>() + b * table.stride(0);
    for (int64_t i = 0; i < used; ++i)
      TORCH_CHECK(pages[i] >= 0 && pages[i] < num_pages, "request ", b, " names page ", pages[i], " of ", num_pages);
  }
}

// Checks what both kinds of attention take; q_[rows]HE.
Paged check_attention(const Tensor& q, const std::tuple<Tensor, Tensor>& pools, const Tensor& kv_head_of) {
  const auto& [k, v] = pools;
  check_rows(q, "q");
  check_rows(k, "k pool");
  check_rows(v, "v pool");
  check_like(k, q, "k pool");
  check_like(v, q, "v pool");
  check_dense(kv_head_of, at::kInt, "kv_head_of_query");
  TORCH_CHECK(q.dim() == 3 && k.dim() == 4 && k.sizes() == v.sizes() && k.size(3) == q.size(2) &&
                  q.size(2) <= MAX_HEAD_SIZE && kv_head_of.numel() == q.size(1),
              "q ", q.sizes(), ", k ", k.sizes(), ", v ", v.sizes(), ", heads ", kv_head_of.sizes(), " do not fit");
  return {k.const_data_ptr(), v.const_data_ptr(), k.stride(0), k.stride(1), k.stride(2),
          v.stride(0),        v.stride(1),        v.stride(2), k.size(2)};
}

struct Tiles {
  std::vector<int32_t> chunk;
  std::vector<int64_t> row, stop, ahead;
};

Tiles tile(const int32_t* first_row, const int32_t* lengths, int64_t chunks, int64_t rows) {
  Tiles tiles;
  TORCH_CHECK(first_row[0] == 0 && first_row[chunks] == rows, "chunks reach from row ", first_row[0], " to ",
              first_row[chunks], ", q has ", rows);
  for (int64_t b = 0; b < chunks; ++b) {
    const int64_t stop = first_row[b + 1], count = stop - first_row[b];
    TORCH_CHECK(count >= 0 && count <= lengths[b], "chunk ", b, " of ", count, " rows has a context of ", lengths[b]);
    tiles.ahead.push_back(lengths[b] - stop);
    for (int64_t row = first_row[b]; row < stop; row += TILE_ROWS) {
      tiles.chunk.push_back(static_cast<int32_t>(b));
      tiles.row.push_back(row);
      tiles.stop.push_back(std::min<int64_t>(row + TILE_ROWS, stop));
    }
  }
  return tiles;
}

}  // namespace
}  // namespace pd
