// What is done with the bytes of a pool, in plain C functions: they know neither tensors nor Python, so that processes
// without torch can call them. Nothing is checked here: pd/transfer/native.py calls them, and says what they mean.
#pragma once

#include <cstdint>

namespace pd {

struct Span {
  uint64_t src, dst, nbytes;
};

// How far a copy has come: the span, and the bytes of it that are done.
struct Cursor {
  uint64_t span, offset;
};

// K, or V, of some heads and layers of a pool; steps are bytes.
struct Rows {
  const uint8_t* base;  // page 0's first head, layer and token of those meant
  int64_t page, head, layer, token, dim;
  int64_t num_heads, num_layers, page_size;
  int64_t first_head, first_layer;  // their numbers in the model
  int64_t num_dims, itemsize;
  const uint64_t* weights;  // odd numbers, one a word of a row
};

// Where pieces of one length may lie: k begins at first + k * step, on either side.
struct Grid {
  uint64_t src_first, src_step, dst_first, dst_step, nbytes;
};

}  // namespace pd

extern "C" {

// Goes on from the cursor for at most so many bytes, and moves it. Returns how many were copied.
__attribute__((visibility("default"))) uint64_t pd_copy(const uint8_t* src, uint8_t* dst, const pd::Span* spans,
                                                        uint64_t num_spans, pd::Cursor* cursor, uint64_t most,
                                                        int is_past_cache);

// What pd/transfer/plan.py's `Route.spans` answers. Returns how many; -1: a page is not in its pool.
// `route`: the unit, src's and dst's page size (tokens), src's and dst's number of pages, the number of lanes; then of
// each lane the strides src page, src token, dst page, dst token, the number of pieces, and their (src, dst, nbytes).
// `job`: the number of units, src's pages, dst's pages. `spans` has room for all units' pieces.
__attribute__((visibility("default"))) int64_t pd_plan(const int64_t* route, const int64_t* job, pd::Span* spans);

// The bytes of all spans together; -1 if one is empty or leaves a region of so many bytes.
__attribute__((visibility("default"))) int64_t pd_fit(const pd::Span* spans, int64_t num_spans, uint64_t src_nbytes,
                                                      uint64_t dst_nbytes);

// The digest (pd/transfer/digest.py) of `num_tokens` on these pages, of which the first is at position `start`. `rows`:
// K's, then V's.
__attribute__((visibility("default"))) uint64_t pd_digest(const pd::Rows* rows, int64_t num_kinds,
                                                          const int64_t* pages, int64_t num_tokens, int64_t start);

// The numbers of all pieces on the grid, of which a span has one or, where neighbours touch on both sides, several.
// Returns how many; -1: a span does not lie on it, or they are more than `most`.
__attribute__((visibility("default"))) int64_t pd_number(const pd::Span* spans, int64_t num_spans,
                                                         const pd::Grid* grid, uint32_t* src, uint32_t* dst,
                                                         int64_t most);
}
