// half_arithmetic.h with a C interface, for test_half_arithmetic.py.

#include "half_arithmetic.h"

#include <algorithm>

namespace {

// One call takes the vector path for all but a rest of fewer than eight elements. Calls with fewer
// than eight take the scalar path for all.
constexpr size_t kScalarPiece = 7;

template <typename Operation>
void combine(bool scalar, uint16_t* out, const uint16_t* a, const uint16_t* b, size_t n) {
  size_t piece = scalar ? kScalarPiece : n;
  for (size_t i = 0; i < n; i += piece) {
    hvdkit::half_combine<Operation>(out + i, a + i, b + i, std::min(piece, n - i));
  }
}

}  // namespace

extern "C" {

int has_vector_path() {
#if defined(__x86_64__)
  return hvdkit::cpu_converts_halves();
#else
  return 0;
#endif
}

void halves_to_floats(const uint16_t* in, float* out, size_t n) {
  std::transform(in, in + n, out, hvdkit::half_to_float);
}

void floats_to_halves(const float* in, uint16_t* out, size_t n) {
  std::transform(in, in + n, out, hvdkit::float_to_half);
}

void sum(bool scalar, uint16_t* out, const uint16_t* a, const uint16_t* b, size_t n) {
  combine<hvdkit::HalfSum>(scalar, out, a, b, n);
}

void product(bool scalar, uint16_t* out, const uint16_t* a, const uint16_t* b, size_t n) {
  combine<hvdkit::HalfProduct>(scalar, out, a, b, n);
}

void minimum(bool scalar, uint16_t* out, const uint16_t* a, const uint16_t* b, size_t n) {
  combine<hvdkit::HalfMinimum>(scalar, out, a, b, n);
}

void maximum(bool scalar, uint16_t* out, const uint16_t* a, const uint16_t* b, size_t n) {
  combine<hvdkit::HalfMaximum>(scalar, out, a, b, n);
}

void scale(bool scalar, uint16_t* out, const uint16_t* in, float factor, size_t n) {
  size_t piece = scalar ? kScalarPiece : n;
  for (size_t i = 0; i < n; i += piece) {
    hvdkit::half_scale(out + i, in + i, factor, std::min(piece, n - i));
  }
}

void dot_and_norms(const uint16_t* a, const uint16_t* b, size_t n, double* results) {
  hvdkit::half_dot_and_norms(a, b, n, results[0], results[1], results[2]);
}

void scaled_add(size_t n, double a_factor, uint16_t* a, double b_factor, const uint16_t* b) {
  hvdkit::half_scaled_add(n, a_factor, a, b_factor, b);
}

}  // extern "C"
