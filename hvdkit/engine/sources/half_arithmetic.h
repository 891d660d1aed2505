// Arithmetic on buffers of IEEE 754 binary16 (half) and of bfloat16 for Horovod and Gloo. Part of
// hvdkit (Apache-2.0).
//
// Every function works on any CPU. On x86-64 the vector paths (AVX + F16C for half, 8 elements at a
// time; AVX2 for bfloat16, 16 at a time) are compiled into this code alone, by function attributes,
// and chosen at run time: a library that includes it needs no architecture flags and starts on a
// CPU without AVX. On aarch64 the compiler's own __fp16 conversions vectorise by themselves. Both
// paths give the same bits, NaN payloads aside: every operation is done in binary32 and rounded to
// nearest even once, subnormals included.

#ifndef HVDKIT_HALF_ARITHMETIC_H
#define HVDKIT_HALF_ARITHMETIC_H

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

namespace hvdkit {

inline float half_to_float(uint16_t half) {
#if defined(__aarch64__)
  __fp16 value;
  std::memcpy(&value, &half, sizeof value);
  return value;
#else
  uint32_t sign = (uint32_t)(half & 0x8000u) << 16;
  uint32_t magnitude = half & 0x7fffu;
  uint32_t bits;
  float value;
  if (magnitude >= 0x7c00u) {  // infinity, or NaN made quiet
    bits = sign | 0x7f800000u | ((magnitude & 0x3ffu) << 13);
    if (magnitude > 0x7c00u) {
      bits |= 0x00400000u;
    }
  } else if (magnitude >= 0x0400u) {
    bits = sign | ((magnitude << 13) + 0x38000000u);
  } else {  // zero or subnormal: a multiple of 2^-24, exact in binary32
    value = (float)magnitude * 5.9604644775390625e-8f;
    std::memcpy(&bits, &value, sizeof bits);
    bits |= sign;
  }
  std::memcpy(&value, &bits, sizeof value);
  return value;
#endif
}

inline uint16_t float_to_half(float value) {
#if defined(__aarch64__)
  __fp16 rounded = value;
  uint16_t half;
  std::memcpy(&half, &rounded, sizeof half);
  return half;
#else
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  uint16_t sign = (uint16_t)((bits >> 16) & 0x8000u);
  uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) {  // NaN, made quiet
    return (uint16_t)(sign | 0x7e00u | ((magnitude >> 13) & 0x3ffu));
  }
  if (magnitude >= 0x477ff000u) {  // 65520 and more round to infinity
    return (uint16_t)(sign | 0x7c00u);
  }
  if (magnitude >= 0x38800000u) {  // normal: a carry out of the mantissa raises the exponent
    uint32_t odd = (magnitude >> 13) & 1u;
    return (uint16_t)(sign | ((magnitude - 0x38000000u + 0x0fffu + odd) >> 13));
  }
  if (magnitude < 0x33000000u) {  // below half of the smallest subnormal
    return sign;
  }
  uint32_t mantissa = (magnitude & 0x007fffffu) | 0x00800000u;
  uint32_t shift = 126u - (magnitude >> 23);  // 14 to 24
  uint32_t kept = mantissa >> shift;
  uint32_t rest = mantissa & ((1u << shift) - 1u);
  uint32_t tie = 1u << (shift - 1u);
  if (rest > tie || (rest == tie && (kept & 1u))) {
    ++kept;
  }
  return (uint16_t)(sign | kept);
#endif
}

// A bfloat16 is the upper half of a binary32.
inline float bfloat16_to_float(uint16_t bfloat) {
  uint32_t bits = (uint32_t)bfloat << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline uint16_t float_to_bfloat16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  if ((bits & 0x7fffffffu) > 0x7f800000u) {  // NaN, made quiet: rounding could end in infinity
    return (uint16_t)((bits >> 16) | 0x0040u);
  }
  // A carry out of the mantissa raises the exponent, at last to infinity.
  return (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// Each operation is defined on two floats (`one`) and on two vectors of 8 floats (`eight`), for both
// 16-bit types. Minimum and maximum follow std::min and std::max, which return their first argument if
// one of the two is NaN. The target attributes of `eight` are a subset of those of its callers, so the
// compiler can inline it.
struct HalfSum {
  static float one(float a, float b) { return a + b; }
#if defined(__x86_64__)
  __attribute__((target("avx"))) static __m256 eight(__m256 a, __m256 b) {
    return _mm256_add_ps(a, b);
  }
#endif
};

struct HalfProduct {
  static float one(float a, float b) { return a * b; }
#if defined(__x86_64__)
  __attribute__((target("avx"))) static __m256 eight(__m256 a, __m256 b) {
    return _mm256_mul_ps(a, b);
  }
#endif
};

struct HalfMinimum {
  static float one(float a, float b) { return b < a ? b : a; }
#if defined(__x86_64__)
  __attribute__((target("avx"))) static __m256 eight(__m256 a, __m256 b) {
    return _mm256_min_ps(b, a);
  }
#endif
};

struct HalfMaximum {
  static float one(float a, float b) { return a < b ? b : a; }
#if defined(__x86_64__)
  __attribute__((target("avx"))) static __m256 eight(__m256 a, __m256 b) {
    return _mm256_max_ps(b, a);
  }
#endif
};

#if defined(__x86_64__)
inline bool cpu_converts_halves() {
  static const bool answer = [] {
    unsigned int eax, ebx, ecx, edx;
    // The builtin also asks whether the operating system saves the AVX registers.
    return __builtin_cpu_supports("avx") && __get_cpuid(1, &eax, &ebx, &ecx, &edx) &&
           (ecx & bit_F16C);
  }();
  return answer;
}

template <typename Operation>
__attribute__((target("avx,f16c"))) inline size_t half_combine_vector(
    uint16_t* out, const uint16_t* a, const uint16_t* b, size_t n) {
  size_t i = 0;
  for (; i + 8 <= n; i += 8) {
    __m256 left = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(a + i)));
    __m256 right = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(b + i)));
    __m128i result = _mm256_cvtps_ph(Operation::eight(left, right), _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128((__m128i*)(out + i), result);
  }
  return i;
}

__attribute__((target("avx,f16c"))) inline size_t half_scale_vector(
    uint16_t* out, const uint16_t* in, float factor, size_t n) {
  const __m256 factors = _mm256_set1_ps(factor);
  size_t i = 0;
  for (; i + 8 <= n; i += 8) {
    __m256 value = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(in + i)));
    __m128i result = _mm256_cvtps_ph(_mm256_mul_ps(value, factors), _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128((__m128i*)(out + i), result);
  }
  return i;
}

__attribute__((target("avx,f16c"))) inline size_t half_widen_vector(float* out, const float* addend,
                                                                   const uint16_t* in, size_t n) {
  size_t i = 0;
  for (; i + 8 <= n; i += 8) {
    __m256 wide = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(in + i)));
    _mm256_storeu_ps(out + i, addend ? _mm256_add_ps(_mm256_loadu_ps(addend + i), wide) : wide);
  }
  return i;
}

__attribute__((target("avx,f16c"))) inline size_t half_narrow_vector(uint16_t* out, const float* in,
                                                                    size_t n) {
  size_t i = 0;
  for (; i + 8 <= n; i += 8) {
    _mm_storeu_si128((__m128i*)(out + i),
                     _mm256_cvtps_ph(_mm256_loadu_ps(in + i), _MM_FROUND_TO_NEAREST_INT));
  }
  return i;
}

inline bool cpu_widens_bfloat16s() {
  static const bool answer = __builtin_cpu_supports("avx2");
  return answer;
}

// Of 16 bfloat16s in a register, each 32 bits hold one of even index below one of odd index. Both
// become binary32 without any element leaving its place: eight of even index, eight of odd index.
__attribute__((target("avx2"))) inline __m256 even_bfloat16s(__m256i sixteen) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(sixteen, 16));
}

__attribute__((target("avx2"))) inline __m256 odd_bfloat16s(__m256i sixteen) {
  return _mm256_castsi256_ps(_mm256_and_si256(sixteen, _mm256_set1_epi32((int)0xffff0000u)));
}

// The bfloat16 in the upper half of each 32 bits; what is in the lower half has no meaning.
__attribute__((target("avx2"))) inline __m256i rounded_bfloat16s(__m256 values) {
  const __m256i bits = _mm256_castps_si256(values);
  __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  __m256i bias = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
  __m256 rounded = _mm256_castsi256_ps(_mm256_add_epi32(bits, bias));
  __m256 quiet = _mm256_or_ps(values, _mm256_castsi256_ps(_mm256_set1_epi32(0x00400000)));
  __m256 is_nan = _mm256_cmp_ps(values, values, _CMP_UNORD_Q);
  return _mm256_castps_si256(_mm256_blendv_ps(rounded, quiet, is_nan));
}

__attribute__((target("avx2"))) inline __m256i interleaved_bfloat16s(__m256 even, __m256 odd) {
  __m256i low = _mm256_srli_epi32(rounded_bfloat16s(even), 16);
  return _mm256_blend_epi16(low, rounded_bfloat16s(odd), 0xaa);
}

template <typename Operation>
__attribute__((target("avx2"))) inline size_t bfloat16_combine_vector(
    uint16_t* out, const uint16_t* a, const uint16_t* b, size_t n) {
  size_t i = 0;
  for (; i + 16 <= n; i += 16) {
    __m256i left = _mm256_loadu_si256((const __m256i*)(a + i));
    __m256i right = _mm256_loadu_si256((const __m256i*)(b + i));
    __m256 even = Operation::eight(even_bfloat16s(left), even_bfloat16s(right));
    __m256 odd = Operation::eight(odd_bfloat16s(left), odd_bfloat16s(right));
    _mm256_storeu_si256((__m256i*)(out + i), interleaved_bfloat16s(even, odd));
  }
  return i;
}

__attribute__((target("avx2"))) inline size_t bfloat16_scale_vector(
    uint16_t* out, const uint16_t* in, float factor, size_t n) {
  const __m256 factors = _mm256_set1_ps(factor);
  size_t i = 0;
  for (; i + 16 <= n; i += 16) {
    __m256i values = _mm256_loadu_si256((const __m256i*)(in + i));
    __m256 even = _mm256_mul_ps(even_bfloat16s(values), factors);
    __m256 odd = _mm256_mul_ps(odd_bfloat16s(values), factors);
    _mm256_storeu_si256((__m256i*)(out + i), interleaved_bfloat16s(even, odd));
  }
  return i;
}

__attribute__((target("avx2"))) inline size_t bfloat16_widen_vector(float* out, const float* addend,
                                                                   const uint16_t* in, size_t n) {
  size_t i = 0;
  for (; i + 8 <= n; i += 8) {
    __m256i eight = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)(in + i)));
    __m256 wide = _mm256_castsi256_ps(_mm256_slli_epi32(eight, 16));
    _mm256_storeu_ps(out + i, addend ? _mm256_add_ps(_mm256_loadu_ps(addend + i), wide) : wide);
  }
  return i;
}

__attribute__((target("avx2"))) inline size_t bfloat16_narrow_vector(uint16_t* out, const float* in,
                                                                    size_t n) {
  size_t i = 0;
  for (; i + 16 <= n; i += 16) {
    __m256i low = _mm256_srli_epi32(rounded_bfloat16s(_mm256_loadu_ps(in + i)), 16);
    __m256i high = _mm256_srli_epi32(rounded_bfloat16s(_mm256_loadu_ps(in + i + 8)), 16);
    // Packs the lower and the upper halves of both registers in turns.
    __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(low, high), 0xd8);
    _mm256_storeu_si256((__m256i*)(out + i), packed);
  }
  return i;
}
#endif

// out[i] = Operation(a[i], b[i]); out may be a or b.
template <typename Operation>
inline void half_combine(void* out_, const void* a_, const void* b_, size_t n) {
  auto* out = static_cast<uint16_t*>(out_);
  auto* a = static_cast<const uint16_t*>(a_);
  auto* b = static_cast<const uint16_t*>(b_);
  size_t i = 0;
#if defined(__x86_64__)
  if (cpu_converts_halves()) {
    i = half_combine_vector<Operation>(out, a, b, n);
  }
#endif
  for (; i < n; ++i) {
    out[i] = float_to_half(Operation::one(half_to_float(a[i]), half_to_float(b[i])));
  }
}

// out[i] = factor * in[i]; out may be in.
inline void half_scale(uint16_t* out, const uint16_t* in, float factor, size_t n) {
  size_t i = 0;
#if defined(__x86_64__)
  if (cpu_converts_halves()) {
    i = half_scale_vector(out, in, factor, n);
  }
#endif
  for (; i < n; ++i) {
    out[i] = float_to_half(factor * half_to_float(in[i]));
  }
}

template <typename Operation>
inline void bfloat16_combine(void* out_, const void* a_, const void* b_, size_t n) {
  auto* out = static_cast<uint16_t*>(out_);
  auto* a = static_cast<const uint16_t*>(a_);
  auto* b = static_cast<const uint16_t*>(b_);
  size_t i = 0;
#if defined(__x86_64__)
  if (cpu_widens_bfloat16s()) {
    i = bfloat16_combine_vector<Operation>(out, a, b, n);
  }
#endif
  for (; i < n; ++i) {
    out[i] = float_to_bfloat16(Operation::one(bfloat16_to_float(a[i]), bfloat16_to_float(b[i])));
  }
}

inline void bfloat16_scale(uint16_t* out, const uint16_t* in, float factor, size_t n) {
  size_t i = 0;
#if defined(__x86_64__)
  if (cpu_widens_bfloat16s()) {
    i = bfloat16_scale_vector(out, in, factor, n);
  }
#endif
  for (; i < n; ++i) {
    out[i] = float_to_bfloat16(factor * bfloat16_to_float(in[i]));
  }
}

// out[i] = addend[i] + in[i], or in[i] where `addend` is null; out may be addend.
inline void half_widen(float* out, const float* addend, const uint16_t* in, size_t n) {
  size_t i = 0;
#if defined(__x86_64__)
  if (cpu_converts_halves()) {
    i = half_widen_vector(out, addend, in, n);
  }
#endif
  for (; i < n; ++i) {
    out[i] = addend ? addend[i] + half_to_float(in[i]) : half_to_float(in[i]);
  }
}

inline void half_narrow(uint16_t* out, const float* in, size_t n) {
  size_t i = 0;
#if defined(__x86_64__)
  if (cpu_converts_halves()) {
    i = half_narrow_vector(out, in, n);
  }
#endif
  for (; i < n; ++i) {
    out[i] = float_to_half(in[i]);
  }
}

inline void bfloat16_widen(float* out, const float* addend, const uint16_t* in, size_t n) {
  size_t i = 0;
#if defined(__x86_64__)
  if (cpu_widens_bfloat16s()) {
    i = bfloat16_widen_vector(out, addend, in, n);
  }
#endif
  for (; i < n; ++i) {
    out[i] = addend ? addend[i] + bfloat16_to_float(in[i]) : bfloat16_to_float(in[i]);
  }
}

inline void bfloat16_narrow(uint16_t* out, const float* in, size_t n) {
  size_t i = 0;
#if defined(__x86_64__)
  if (cpu_widens_bfloat16s()) {
    i = bfloat16_narrow_vector(out, in, n);
  }
#endif
  for (; i < n; ++i) {
    out[i] = float_to_bfloat16(in[i]);
  }
}

// Adasum's two steps, for half alone. The sums are taken in binary64.
inline void half_dot_and_norms(const uint16_t* a, const uint16_t* b, size_t n, double& dot,
                               double& a_squared, double& b_squared) {
  dot = a_squared = b_squared = 0.0;
  for (size_t i = 0; i < n; ++i) {
    double left = half_to_float(a[i]);
    double right = half_to_float(b[i]);
    dot += left * right;
    a_squared += left * left;
    b_squared += right * right;
  }
}

inline void half_scaled_add(size_t n, double a_factor, uint16_t* a, double b_factor,
                            const uint16_t* b) {
  for (size_t i = 0; i < n; ++i) {
    a[i] = float_to_half((float)a_factor * half_to_float(a[i]) +
                         (float)b_factor * half_to_float(b[i]));
  }
}

}  // namespace hvdkit

#endif  // HVDKIT_HALF_ARITHMETIC_H
