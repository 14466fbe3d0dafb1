// Which bytes of a pool go where in another's: what pd/transfer/plan.py plans, for many pieces, without the interpreter.
// Where a copy has just emptied the processor's caches it is code that is missing, not speed: this is little of it.
#include "bytes.h"

#include <algorithm>

namespace {

bool is_before(const pd::Span& a, const pd::Span& b) { return a.src < b.src; }

// Those that touch on both sides are joined. Returns how many are left.
int64_t merged(pd::Span* spans, int64_t num_spans) {
  if (!num_spans) return 0;
  pd::Span* last = spans;
  for (const pd::Span* next = spans + 1; next < spans + num_spans; ++next) {
    if (next->src == last->src + last->nbytes && next->dst == last->dst + last->nbytes)
      last->nbytes += next->nbytes;
    else
      *++last = *next;
  }
  return last + 1 - spans;
}

bool are_within(const int64_t* pages, int64_t num_pages, int64_t num_in_pool) {
  return std::all_of(pages, pages + num_pages, [=](int64_t page) { return page >= 0 && page < num_in_pool; });
}

}  // namespace

int64_t pd_plan(const int64_t* route, const int64_t* job, pd::Span* spans) {
  const int64_t unit = route[0], size_src = route[1], size_dst = route[2];
  const int64_t num_units = job[0], num_tokens = num_units * unit;
  const int64_t num_src = (num_tokens + size_src - 1) / size_src, num_dst = (num_tokens + size_dst - 1) / size_dst;
  const int64_t *src_pages = job + 1, *dst_pages = src_pages + num_src;
  if (!are_within(src_pages, num_src, route[3]) || !are_within(dst_pages, num_dst, route[4])) return -1;
  pd::Span* next = spans;
  const int64_t* lane = route + 6;
  for (int64_t left = route[5]; left; --left) {
    const int64_t *pieces = lane + 5, *end = pieces + 3 * lane[4];
    for (int64_t token = 0; token < num_tokens; token += unit) {
      const int64_t src = src_pages[token / size_src] * lane[0] + token % size_src * lane[1];
      const int64_t dst = dst_pages[token / size_dst] * lane[2] + token % size_dst * lane[3];
      for (const int64_t* piece = pieces; piece < end; piece += 3)
        *next++ = {static_cast<uint64_t>(src + piece[0]), static_cast<uint64_t>(dst + piece[1]),
                   static_cast<uint64_t>(piece[2])};
    }
    lane = end;
  }
  if (!std::is_sorted(spans, next, is_before)) std::sort(spans, next, is_before);
  return merged(spans, next - spans);
}

int64_t pd_fit(const pd::Span* spans, int64_t num_spans, uint64_t src_nbytes, uint64_t dst_nbytes) {
  uint64_t total = 0;
  for (const pd::Span* span = spans; span < spans + num_spans; ++span) {
    const uint64_t nbytes = span->nbytes;
    if (!nbytes || nbytes > src_nbytes || span->src > src_nbytes - nbytes) return -1;
    if (nbytes > dst_nbytes || span->dst > dst_nbytes - nbytes) return -1;
    total += nbytes;
  }
  return total;
}
