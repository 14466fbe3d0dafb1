// Sums of several arrays, element by element, in the order given: for collectives in shared memory.
#pragma once

#include "ops.h"
#include "vec.h"

namespace {

// out[i] = sources[0][i] + sources[1][i] + ... in float, rounded once. `out` may be one of the sources.
template <class T> void add_up(const void* const* sources, int num_sources, int64_t size, void* out) {
  for (int64_t i = 0; i < size; i += 2 * W) {
    const bool is_whole = i + 2 * W <= size;
    Two total = {zero(), zero()};
    for (int s = 0; s < num_sources; ++s) {
      const T* from = static_cast<const T*>(sources[s]) + i;
      const Two x = is_whole ? load_two(from) : load_two_some(from, size - i);
      total = {add(total.a, x.a), add(total.b, x.b)};
    }
    T* to = static_cast<T*>(out) + i;
    if (is_whole) store_two(to, total);
    else store_two_some(to, total, size - i);
  }
}

}  // namespace
