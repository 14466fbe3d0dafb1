// Numbers pieces that lie at equal steps: what a library wants to know of a batch whose memory it was told as a grid.
#include "bytes.h"

extern "C" int64_t pd_number(const pd::Span* spans, int64_t num_spans, const pd::Grid* grid, uint32_t* src,
                             uint32_t* dst, int64_t most) {
  const auto [src_first, src_step, dst_first, dst_step, nbytes] = *grid;
  const bool is_dense = src_step == nbytes && dst_step == nbytes;
  int64_t done = 0;
  for (int64_t i = 0; i < num_spans; ++i) {
    if (spans[i].src < src_first || spans[i].dst < dst_first) return -1;  // else the differences wrap
    const uint64_t from = (spans[i].src - src_first) / src_step, to = (spans[i].dst - dst_first) / dst_step;
    const uint64_t many = spans[i].nbytes == nbytes ? 1 : spans[i].nbytes / nbytes;
    if (src_first + from * src_step != spans[i].src || dst_first + to * dst_step != spans[i].dst ||
        many * nbytes != spans[i].nbytes || (many > 1 && !is_dense) ||
        many > static_cast<uint64_t>(most - done)) {
      return -1;
    }
    for (uint64_t k = 0; k < many; ++k, ++done) {
      src[done] = static_cast<uint32_t>(from + k);
      dst[done] = static_cast<uint32_t>(to + k);
    }
  }
  return done;
}
