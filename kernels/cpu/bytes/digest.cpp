// The digest of a pool's rows, the same number that pd/transfer/digest.py makes of them in PyTorch: there is what it
// means. Here a row is read once, as it lies, and K and V of a page in one pass, so memory's bandwidth is the bound.
#include "bytes.h"

#include <algorithm>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

constexpr uint64_t LAYER = 0x9FB21C651E98DF25, HEAD = 0xD6E8FEB86659FD93;
constexpr uint64_t POSITION = 0xC2B2AE3D27D4EB4F, KIND = 0x165667B19E3779F9, MIX = 0xBF58476D1CE4E5B9;
constexpr int64_t WORD = 8;

uint64_t folded(uint64_t word) { return word ^ word >> 32; }

// The sign comes in from the left.
uint64_t stirred(uint64_t x, int by) { return x ^ static_cast<uint64_t>(static_cast<int64_t>(x) >> by); }

uint64_t mixed(uint64_t x) { return stirred(stirred(x, 32) * MIX, 29); }

uint64_t load(const uint8_t* at, int64_t nbytes = WORD) {
  uint64_t word = 0;
  std::memcpy(&word, at, nbytes);
  return word;
}

// Of a row whose elements are neighbours, from word `i` on.
uint64_t hash_words(const uint8_t* row, int64_t nbytes, const uint64_t* weights, int64_t i = 0) {
  const int64_t num_words = nbytes / WORD, rest = nbytes % WORD;
  uint64_t hash = 0;
  for (; i < num_words; ++i) hash += folded(load(row + WORD * i)) * weights[i];
  if (rest) hash += folded(load(row + WORD * num_words, rest)) * weights[num_words];
  return hash;
}

#if defined(__x86_64__)

// Four words at a time. AVX2 has no product of 64 bits: low·low counts whole, and of low·high + high·low the low half,
// 32 bits further up; the latter are added up in halves of their own.
__attribute__((target("avx2"))) uint64_t hash_avx2(const uint8_t* row, int64_t nbytes, const uint64_t* weights) {
  const int64_t num_fours = nbytes / WORD / 4;
  __m256i low = _mm256_setzero_si256(), high = low;
  for (int64_t i = 0; i < num_fours; ++i) {
    const __m256i word = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(row) + i);
    const __m256i weight = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(weights) + i);
    const __m256i fold = _mm256_xor_si256(word, _mm256_srli_epi64(word, 32));
    low = _mm256_add_epi64(low, _mm256_mul_epu32(fold, weight));
    high = _mm256_add_epi32(high, _mm256_mullo_epi32(fold, _mm256_shuffle_epi32(weight, 0xB1)));
  }
  high = _mm256_add_epi64(_mm256_slli_epi64(high, 32), _mm256_and_si256(high, _mm256_set1_epi64x(-1ll << 32)));
  const __m256i four = _mm256_add_epi64(low, high);
  const __m128i two = _mm_add_epi64(_mm256_castsi256_si128(four), _mm256_extracti128_si256(four, 1));
  const uint64_t first = _mm_cvtsi128_si64(two), second = _mm_extract_epi64(two, 1), hash = first + second;
  return 4 * WORD * num_fours == nbytes ? hash : hash + hash_words(row, nbytes, weights, 4 * num_fours);
}

uint64_t hash_row(const uint8_t* row, int64_t nbytes, const uint64_t* weights) {
  static const bool has_avx2 = __builtin_cpu_supports("avx2");
  return has_avx2 ? hash_avx2(row, nbytes, weights) : hash_words(row, nbytes, weights);
}

#else

uint64_t hash_row(const uint8_t* row, int64_t nbytes, const uint64_t* weights) {
  return hash_words(row, nbytes, weights);
}

#endif

// Of a row whose elements lie apart: a word of them at a time.
uint64_t hash_apart(const uint8_t* row, const pd::Rows& rows) {
  const int64_t num_each = WORD / rows.itemsize;
  uint64_t hash = 0;
  for (int64_t first = 0; first < rows.num_dims; first += num_each) {
    uint8_t word[WORD] = {};
    for (int64_t e = first; e < std::min(first + num_each, rows.num_dims); ++e)
      std::memcpy(word + (e - first) * rows.itemsize, row + e * rows.dim, rows.itemsize);
    hash += folded(load(word)) * rows.weights[first / num_each];
  }
  return hash;
}

// Of one head and layer of a page: its first tokens, of which the first is at `position`.
uint64_t sum_tokens(const uint8_t* at, const pd::Rows& rows, uint64_t place, int64_t num_tokens) {
  const bool is_whole = rows.dim == rows.itemsize || rows.num_dims == 1;
  uint64_t sum = 0;
  for (int64_t t = 0; t < num_tokens; ++t, at += rows.token, place += POSITION)
    sum += mixed(place + (is_whole ? hash_row(at, rows.num_dims * rows.itemsize, rows.weights) : hash_apart(at, rows)));
  return sum;
}

}  // namespace

uint64_t pd_digest(const pd::Rows* rows, int64_t num_kinds, const int64_t* pages, int64_t num_tokens, int64_t start) {
  uint64_t sum = 0;
  for (int64_t done = 0; done < num_tokens; done += rows->page_size, ++pages) {
    const int64_t here = std::min(rows->page_size, num_tokens - done);
    const uint64_t position = static_cast<uint64_t>(start + done) * POSITION;
    for (int64_t h = 0; h < rows->num_heads; ++h)
      for (int64_t l = 0; l < rows->num_layers; ++l)
        for (int64_t kind = 0; kind < num_kinds; ++kind) {
          const pd::Rows& of = rows[kind];
          const uint8_t* at = of.base + *pages * of.page + h * of.head + l * of.layer;
          const uint64_t place = position + (of.first_head + h) * HEAD + (of.first_layer + l) * LAYER + kind * KIND;
          sum += sum_tokens(at, of, place, here);
        }
  }
  return sum;
}
