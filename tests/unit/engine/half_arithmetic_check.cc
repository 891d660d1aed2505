// half_arithmetic.h with a C interface, for test_half_arithmetic.py.

#include "half_arithmetic.h"

#include <algorithm>

namespace {

// One call takes the vector path for all but a rest of fewer than eight elements, or sixteen. Calls
// with fewer than eight take the scalar path for all.
constexpr size_t kScalarPiece = 7;

template <typename Call>
void in_pieces(bool scalar, size_t n, Call call) {
  size_t piece = scalar ? kScalarPiece : n;
  for (size_t i = 0; i < n; i += piece) {
    call(i, std::min(piece, n - i));
  }
}

}  // namespace

#define CONVERSIONS(TYPE)                                                  \
  void TYPE##_widen(bool scalar, float* out, const float* addend,          \
                    const uint16_t* in, size_t n) {                        \
    in_pieces(scalar, n, [=](size_t i, size_t length) {                    \
      hvdkit::TYPE##_widen(out + i, addend ? addend + i : nullptr, in + i, \
                           length);                                        \
    });                                                                    \
  }                                                                        \
  void TYPE##_narrow(bool scalar, uint16_t* out, const float* in,          \
                     size_t n) {                                           \
    in_pieces(scalar, n, [=](size_t i, size_t length) {                    \
      hvdkit::TYPE##_narrow(out + i, in + i, length);                      \
    });                                                                    \
  }                                                                        \
  void TYPE##_scale(bool scalar, uint16_t* out, const uint16_t* in,        \
                    float factor, size_t n) {                              \
    in_pieces(scalar, n, [=](size_t i, size_t length) {                    \
      hvdkit::TYPE##_scale(out + i, in + i, factor, length);               \
    });                                                                    \
  }

#define COMBINATION(TYPE, NAME, OPERATION)                                 \
  void TYPE##_##NAME(bool scalar, uint16_t* out, const uint16_t* a,        \
                     const uint16_t* b, size_t n) {                        \
    in_pieces(scalar, n, [=](size_t i, size_t length) {                    \
      hvdkit::TYPE##_combine<hvdkit::OPERATION>(out + i, a + i, b + i,     \
                                                length);                   \
    });                                                                    \
  }

extern "C" {

int half_has_vector_path() {
#if defined(__x86_64__)
  return hvdkit::cpu_converts_halves();
#else
  return 0;
#endif
}

int bfloat16_has_vector_path() {
#if defined(__x86_64__)
  return hvdkit::cpu_widens_bfloat16s();
#else
  return 0;
#endif
}

CONVERSIONS(half)
COMBINATION(half, sum, HalfSum)
COMBINATION(half, product, HalfProduct)
COMBINATION(half, minimum, HalfMinimum)
COMBINATION(half, maximum, HalfMaximum)

CONVERSIONS(bfloat16)
COMBINATION(bfloat16, sum, HalfSum)
COMBINATION(bfloat16, product, HalfProduct)
COMBINATION(bfloat16, minimum, HalfMinimum)
COMBINATION(bfloat16, maximum, HalfMaximum)

void dot_and_norms(const uint16_t* a, const uint16_t* b, size_t n, double* results) {
  hvdkit::half_dot_and_norms(a, b, n, results[0], results[1], results[2]);
}

void scaled_add(size_t n, double a_factor, uint16_t* a, double b_factor, const uint16_t* b) {
  hvdkit::half_scaled_add(n, a_factor, a, b_factor, b);
}

}  // extern "C"
