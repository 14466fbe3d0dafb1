// What an instruction set's compilation offers the binding: plain pointers, sizes and strides in elements.
#pragma once

#include <cstdint>

namespace pd {

constexpr int PANEL = 16;            // outputs of a linear that stand side by side
constexpr int MAX_HEAD_SIZE = 576;  // of attention: what its stack holds; a latent of 512 and a rotated key of 64
constexpr int64_t PART = 512;       // tokens of one part of a context
constexpr int64_t TILE_ROWS = 16;   // of a chunk, attended together

// Calls body(context, begin, end) over pieces of [0, size), on several threads where that pays; returns when all ended.
using Body = void (*)(const void* context, int64_t begin, int64_t end);
void parallel_for(int64_t size, int64_t grain, Body body, const void* context);

struct Linear {
  const void* x;       // [rows][inputs], bf16 or float
  int64_t x_stride;    // of a row
  const void* panels;  // bf16: [panel][input pair][16 outputs][2]; float: [panel][input][16 outputs]; zeros beyond
  const void* bias;    // [outputs] or null
  void* y;             // [rows][outputs]
  int64_t rows, inputs, outputs;
  void* scratch;  // linear_scratch bytes, aligned to 64
};

struct Paged {
  const void* k;  // [page][head][token][e]
  const void* v;
  int64_t k_page, k_head, k_token, v_page, v_head, v_token, page_size;
};

struct Attention {
  const void* q;  // [b][head][e]
  int64_t q_row, q_head;
  Paged pool;
  const int32_t* table;  // [b][...]
  int64_t table_row;
  const int32_t* part_row;    // of each part: its request,
  const int64_t* part_start;  // and the tokens [start, stop) it attends to
  const int64_t* part_stop;
  int64_t num_parts;
  const int32_t* group_heads;  // query heads sorted by their kv head
  const int32_t* group_start;  // [kv heads + 1]: where each kv head's begin
  int64_t kv_heads, heads, head_size;
  float scale;
  float* partial;            // [part][head][partial_size]: largest score, sum, weighted values; aligned to 64
  int64_t partial_size;      // floats
  void* out;                 // [b][head][e], contiguous
  const int64_t* row_parts;  // [b + 1]: each request's parts
  int64_t rows;
};

struct Chunks {
  const void* q;  // [row][head][e], the chunks' rows one after the other
  int64_t q_row, q_head;
  Paged pool;
  const int32_t* table;  // [chunk][...]
  int64_t table_row;
  const int32_t* tile_chunk;  // of each tile: whose rows they are,
  const int64_t* tile_row;    // the first of up to tile_rows,
  const int64_t* tile_stop;   // and the one after the last
  int64_t num_tiles;
  const int64_t* ahead;        // of each chunk: its row's position is row + ahead
  const int32_t* group_heads;  // as above
  const int32_t* group_start;
  int64_t kv_heads, heads, head_size, window;  // window 0: all
  float scale;
  void* out;  // [row][head][e], contiguous
};

struct Norm {
  const void* x;
  int64_t x_stride;
  const void* weight;
  void* residual;  // null, or [rows][size], to which x is added first
  int64_t residual_stride;
  void* out;  // [rows][size], contiguous
  int64_t rows, size;
  float eps;
};

struct Silu {
  const void* gate_up;  // [rows][2 size]
  int64_t stride;
  void* out;  // [rows][size]
  int64_t rows, size;
};

struct Rope {
  void* q;  // [token][head][e]
  const void* k;
  const void* v;
  int64_t q_token, q_head, k_token, k_head, v_token, v_head;
  const float* cos;  // [token][half]
  const float* sin;
  void* k_pool;  // [page][head][token][e]
  void* v_pool;
  int64_t kp_page, kp_head, kp_token, vp_page, vp_head, vp_token;
  const int64_t* pages;
  const int64_t* offsets;
  int64_t tokens, heads, kv_heads, k_size, v_size, half;
};

struct Choice {
  const void* x;  // [rows][size]; race: float
  int64_t stride, rows, size;
  const float* floor;  // race only, as the next two
  const int64_t* seed;
  const int64_t* position;
  int64_t* ids;
};

struct Table {
  const char* name;
  int64_t (*linear_scratch)(int64_t rows, int64_t inputs);
  void (*linear_bf16)(const Linear&);
  void (*linear_f32)(const Linear&);
  void (*attend_bf16)(const Attention&);
  void (*attend_f32)(const Attention&);
  int64_t (*partial_size)(int64_t head_size);
  void (*attend_many_bf16)(const Chunks&);
  void (*attend_many_f32)(const Chunks&);
  void (*norm_bf16)(const Norm&);
  void (*norm_f32)(const Norm&);
  void (*silu_bf16)(const Silu&);
  void (*silu_f32)(const Silu&);
  void (*rope_bf16)(const Rope&);
  void (*rope_f32)(const Rope&);
  void (*argmax_bf16)(const Choice&);
  void (*argmax_f32)(const Choice&);
  void (*race)(const Choice&);
  void (*add_up_bf16)(const void* const* sources, int num_sources, int64_t size, void* out);
  void (*add_up_f32)(const void* const* sources, int num_sources, int64_t size, void* out);
};

const Table& table_avx2();
const Table& table_avx512();
const Table& table_avx512bf16();

}  // namespace pd
