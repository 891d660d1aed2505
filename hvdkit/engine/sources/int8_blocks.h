// Blocks of 256 numbers as 8-bit integers with one scale, for the network. Part of hvdkit
// (Apache-2.0).
//
// A block is a binary32 scale and up to 256 codes of one byte: the number i is scale x code[i]. The
// scale is (largest magnitude of the block) / 127, and a code is the quotient number / scale, rounded
// to nearest even. So each number changes by at most (largest magnitude) / 254. 127 x scale is finite, so
// finite numbers remain finite. A block with a number
// that is not finite has the scale NaN: all of its numbers become NaN.
//
// As in half_arithmetic.h, the vector path is chosen at run time and gives the same bits.

#ifndef HVDKIT_INT8_BLOCKS_H
#define HVDKIT_INT8_BLOCKS_H

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace hvdkit {

constexpr size_t kBlock = 256;                   // numbers
constexpr size_t kBlockHead = sizeof(float);     // bytes of the scale

// The size of `n` numbers in bytes.
inline size_t int8_bytes(size_t n) { return n + (n + kBlock - 1) / kBlock * kBlockHead; }

inline float int8_scale(uint32_t largest_bits) {
  float largest, scale;
  if (largest_bits >= 0x7f800000u) {  // infinity or NaN
    const uint32_t nan = 0x7fc00000u;
    std::memcpy(&scale, &nan, sizeof scale);
    return scale;
  }
  std::memcpy(&largest, &largest_bits, sizeof largest);
  scale = largest / 127.0f;
  if (scale * 127.0f < largest) {  // rounded down; matters for subnormal numbers
    scale = std::nextafter(scale, largest);
  }
  if (scale * 127.0f > std::numeric_limits<float>::max()) {
    scale = std::nextafter(scale, 0.0f);
  }
  return scale;
}

#if defined(__x86_64__)
inline bool cpu_has_avx2() {
  static const bool answer = __builtin_cpu_supports("avx2");
  return answer;
}

// The bits of the largest magnitude of the first multiple of 8 numbers.
__attribute__((target("avx2"))) inline uint32_t int8_largest_vector(const float* in, size_t n) {
  const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
  __m256i largest = _mm256_setzero_si256();
  for (size_t i = 0; i + 8 <= n; i += 8) {
    __m256i bits = _mm256_loadu_si256((const __m256i*)(in + i));
    largest = _mm256_max_epi32(largest, _mm256_and_si256(bits, magnitude));
  }
  alignas(32) uint32_t lanes[8];
  _mm256_store_si256((__m256i*)lanes, largest);
  return *std::max_element(lanes, lanes + 8);
}

__attribute__((target("avx2"))) inline size_t int8_encode_vector(int8_t* out, const float* in,
                                                                float scale, size_t n) {
  const __m256 divisor = _mm256_set1_ps(scale);
  // The two packs work on halves of the registers: this puts groups of four codes back in order.
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  size_t i = 0;
  for (; i + 32 <= n; i += 32) {
    __m256i a = _mm256_cvtps_epi32(_mm256_div_ps(_mm256_loadu_ps(in + i), divisor));
    __m256i b = _mm256_cvtps_epi32(_mm256_div_ps(_mm256_loadu_ps(in + i + 8), divisor));
    __m256i c = _mm256_cvtps_epi32(_mm256_div_ps(_mm256_loadu_ps(in + i + 16), divisor));
    __m256i d = _mm256_cvtps_epi32(_mm256_div_ps(_mm256_loadu_ps(in + i + 24), divisor));
    __m256i codes = _mm256_packs_epi16(_mm256_packs_epi32(a, b), _mm256_packs_epi32(c, d));
    _mm256_storeu_si256((__m256i*)(out + i), _mm256_permutevar8x32_epi32(codes, order));
  }
  return i;
}

__attribute__((target("avx2"))) inline size_t int8_decode_vector(float* out, const int8_t* in,
                                                                float scale, size_t n) {
  const __m256 factor = _mm256_set1_ps(scale);
  size_t i = 0;
  for (; i + 8 <= n; i += 8) {
    __m256i codes = _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)(in + i)));
    _mm256_storeu_ps(out + i, _mm256_mul_ps(_mm256_cvtepi32_ps(codes), factor));
  }
  return i;
}
#endif

// Writes int8_bytes(n) bytes.
inline void int8_encode(void* out_, const float* in, size_t n) {
  auto* out = static_cast<char*>(out_);
  for (size_t begin = 0; begin < n; begin += kBlock, out += kBlockHead + kBlock) {
    const float* numbers = in + begin;
    const size_t count = std::min(kBlock, n - begin);
    uint32_t largest = 0;
    size_t i = 0;
#if defined(__x86_64__)
    if (cpu_has_avx2()) {
      largest = int8_largest_vector(numbers, count);
      i = count / 8 * 8;
    }
#endif
    for (; i < count; ++i) {
      uint32_t bits;
      std::memcpy(&bits, numbers + i, sizeof bits);
      largest = std::max(largest, bits & 0x7fffffffu);
    }
    const float scale = int8_scale(largest);
    std::memcpy(out, &scale, sizeof scale);
    auto* codes = reinterpret_cast<int8_t*>(out + kBlockHead);
    if (!(scale > 0.0f)) {  // only zeros, or NaN
      std::memset(codes, 0, count);
      continue;
    }
    i = 0;
#if defined(__x86_64__)
    if (cpu_has_avx2()) {
      i = int8_encode_vector(codes, numbers, scale, count);
    }
#endif
    for (; i < count; ++i) {
      codes[i] = (int8_t)std::nearbyint(numbers[i] / scale);
    }
  }
}

// Reads what int8_encode has written for `n` numbers.
inline void int8_decode(float* out, const void* in_, size_t n) {
  auto* in = static_cast<const char*>(in_);
  for (size_t begin = 0; begin < n; begin += kBlock, in += kBlockHead + kBlock) {
    const size_t count = std::min(kBlock, n - begin);
    float scale;
    std::memcpy(&scale, in, sizeof scale);
    auto* codes = reinterpret_cast<const int8_t*>(in + kBlockHead);
    size_t i = 0;
#if defined(__x86_64__)
    if (cpu_has_avx2()) {
      i = int8_decode_vector(out + begin, codes, scale, count);
    }
#endif
    for (; i < count; ++i) {
      out[begin + i] = scale * (float)codes[i];
    }
  }
}

}  // namespace hvdkit

#endif  // HVDKIT_INT8_BLOCKS_H
