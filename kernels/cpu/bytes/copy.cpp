// Copies many spans from one region of memory to another: KV on its way between the pools of two processes.
//
// A copy far larger than a cache pays three times with plain stores: what is written is first read, and pushes out what
// was in the cache. So lines are written whole and past the cache. glibc's memcpy does the same, but chooses by the size
// of a single piece, and a page's piece is never large enough for it.
#include "bytes.h"

#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

constexpr uint64_t LINE = 64;

#if defined(__x86_64__)

constexpr uint64_t AHEAD = 256;  // bytes: the hardware's own reading ahead ends with each page of 4 KiB
constexpr uint64_t SMALL = 4 * LINE;  // below it a piece has hardly a whole line

inline void line_sse2(uint8_t* dst, const uint8_t* src) {
  _mm_prefetch(reinterpret_cast<const char*>(src + AHEAD), _MM_HINT_NTA);
  const auto* from = reinterpret_cast<const __m128i*>(src);
  auto* to = reinterpret_cast<__m128i*>(dst);
  const __m128i a = _mm_loadu_si128(from), b = _mm_loadu_si128(from + 1);
  const __m128i c = _mm_loadu_si128(from + 2), d = _mm_loadu_si128(from + 3);
  _mm_stream_si128(to, a);
  _mm_stream_si128(to + 1, b);
  _mm_stream_si128(to + 2, c);
  _mm_stream_si128(to + 3, d);
}

__attribute__((target("avx2"))) inline void line_avx2(uint8_t* dst, const uint8_t* src) {
  _mm_prefetch(reinterpret_cast<const char*>(src + AHEAD), _MM_HINT_NTA);
  const auto* from = reinterpret_cast<const __m256i*>(src);
  auto* to = reinterpret_cast<__m256i*>(dst);
  const __m256i a = _mm256_loadu_si256(from), b = _mm256_loadu_si256(from + 1);
  _mm256_stream_si256(to, a);
  _mm256_stream_si256(to + 1, b);
}

// `nbytes` of whole lines, to where a line begins. Both halves go at once: while one waits for a page's address or for
// memory the other moves on. On Zen 3, pieces of 120 KiB: 11.6 GB/s, and 9.3 from front to back (SSE2: 10.1).
void stream_sse2(uint8_t* dst, const uint8_t* src, uint64_t nbytes) {
  const uint64_t half = nbytes / 2 / LINE * LINE;
  for (uint64_t i = 0; i < half; i += LINE) {
    line_sse2(dst + i, src + i);
    line_sse2(dst + half + i, src + half + i);
  }
  if (2 * half < nbytes) line_sse2(dst + 2 * half, src + 2 * half);
}

__attribute__((target("avx2"))) void stream_avx2(uint8_t* dst, const uint8_t* src, uint64_t nbytes) {
  const uint64_t half = nbytes / 2 / LINE * LINE;
  for (uint64_t i = 0; i < half; i += LINE) {
    line_avx2(dst + i, src + i);
    line_avx2(dst + half + i, src + half + i);
  }
  if (2 * half < nbytes) line_avx2(dst + 2 * half, src + 2 * half);
}

void copy_past_cache(uint8_t* dst, const uint8_t* src, uint64_t nbytes) {
  if (nbytes < SMALL) {
    std::memcpy(dst, src, nbytes);
    return;
  }
  static const auto stream = __builtin_cpu_supports("avx2") ? stream_avx2 : stream_sse2;
  const uint64_t head = -reinterpret_cast<uintptr_t>(dst) % LINE;
  const uint64_t lines = (nbytes - head) / LINE * LINE;
  std::memcpy(dst, src, head);
  stream(dst + head, src + head, lines);
  std::memcpy(dst + head + lines, src + head + lines, nbytes - head - lines);
}

void settle() { _mm_sfence(); }  // stores past the cache are seen in no order until then

#else

void copy_past_cache(uint8_t* dst, const uint8_t* src, uint64_t nbytes) { std::memcpy(dst, src, nbytes); }
void settle() {}

#endif

}  // namespace

uint64_t pd_copy(const uint8_t* src, uint8_t* dst, const pd::Span* spans, uint64_t num_spans, pd::Cursor* cursor,
                 uint64_t most, int is_past_cache) {
  uint64_t left = most;
  while (left && cursor->span < num_spans) {
    const pd::Span& span = spans[cursor->span];
    const uint64_t rest = span.nbytes - cursor->offset;
    const uint64_t part = rest < left ? rest : left;
    const auto copy = is_past_cache ? copy_past_cache : [](uint8_t* to, const uint8_t* from, uint64_t nbytes) {
      std::memcpy(to, from, nbytes);
    };
    copy(dst + span.dst + cursor->offset, src + span.src + cursor->offset, part);
    left -= part;
    *cursor = part == rest ? pd::Cursor{cursor->span + 1, 0} : pd::Cursor{cursor->span, cursor->offset + part};
  }
  settle();
  return most - left;
}
