// Sums over buffers of several ranks, chunk by chunk. Part of hvdkit (Apache-2.0).

#ifndef HVDKIT_HOST_SUMS_H
#define HVDKIT_HOST_SUMS_H

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <type_traits>
#include <vector>

#include "half_arithmetic.h"

namespace hvdkit {

// The version of the order in which the collectives add. Increase it with each change that may give sums
// other last bits.
constexpr int kSumOrder = 3;

// What is computed from the values of the ranks.
enum class Reduction { kSum, kMin, kMax, kProduct };

enum class Element { kFloat32, kFloat64, kFloat16, kBfloat16, kInt32, kInt64 };

// Returns whether the collectives can add elements of a dtype, which has Horovod's number.
inline bool element_of(int type, Element& element) {
  static const std::map<int, Element> elements = {{4, Element::kInt32},   {5, Element::kInt64},
                                                  {6, Element::kFloat16}, {7, Element::kFloat32},
                                                  {8, Element::kFloat64}, {10, Element::kBfloat16}};
  const auto found = elements.find(type);
  if (found != elements.end()) {
    element = found->second;
  }
  return found != elements.end();
}

inline size_t size_of(Element element) {
  switch (element) {
    case Element::kFloat64:
    case Element::kInt64:
      return 8;
    case Element::kFloat16:
    case Element::kBfloat16:
      return 2;
    default:
      return 4;
  }
}

// Integers wrap around, where the sum of signed ones would be undefined.
template <typename T>
T sum_of(T a, T b) {
  if constexpr (std::is_integral<T>::value) {
    using Unsigned = typename std::make_unsigned<T>::type;
    return (T)((Unsigned)a + (Unsigned)b);
  } else {
    return a + b;
  }
}

// Each dtype's arithmetic on a chunk, in a dtype that is wide enough: sums of halves are rounded once.
template <typename T>
struct Plain {
  using Stored = T;
  using Wide = T;
  static void set(T* sum, const T* in, size_t n) { std::memcpy(sum, in, n * sizeof(T)); }
  static void add(T* sum, const T* in, size_t n) {
    for (size_t i = 0; i < n; ++i) {
      sum[i] = sum_of(sum[i], in[i]);
    }
  }
  // As Horovod's ScaleBuffer: integers are rounded towards zero.
  static void scale(T* sum, double factor, size_t n) {
    for (size_t i = 0; i < n; ++i) {
      sum[i] = (T)(factor * sum[i]);
    }
  }
  static void get(T* out, const T* sum, size_t n) { std::memcpy(out, sum, n * sizeof(T)); }
  static void add_two(T* out, const T* a, const T* b, size_t n) {
    for (size_t i = 0; i < n; ++i) {
      out[i] = sum_of(a[i], b[i]);
    }
  }
};

template <>
inline void Plain<float>::scale(float* sum, double factor, size_t n) {
  for (size_t i = 0; i < n; ++i) {
    sum[i] *= (float)factor;
  }
}

template <void (*Widen)(float*, const float*, const uint16_t*, size_t),
          void (*Narrow)(uint16_t*, const float*, size_t),
          void (*AddTwo)(void*, const void*, const void*, size_t)>
struct Widened {
  using Stored = uint16_t;
  using Wide = float;
  static void set(float* sum, const uint16_t* in, size_t n) { Widen(sum, nullptr, in, n); }
  static void add(float* sum, const uint16_t* in, size_t n) { Widen(sum, sum, in, n); }
  static void scale(float* sum, double factor, size_t n) { Plain<float>::scale(sum, factor, n); }
  static void get(uint16_t* out, const float* sum, size_t n) { Narrow(out, sum, n); }
  static void add_two(uint16_t* out, const uint16_t* a, const uint16_t* b, size_t n) {
    AddTwo(out, a, b, n);
  }
};

using Half = Widened<half_widen, half_narrow, half_combine<HalfSum>>;
using Bfloat16 = Widened<bfloat16_widen, bfloat16_narrow, bfloat16_combine<HalfSum>>;

template <typename Arithmetic>
void scale(typename Arithmetic::Wide* sum, double factor, size_t n) {
  if (factor != 1.0) {
    Arithmetic::scale(sum, factor, n);
  }
}

// Computes factor x (inputs[0][i] + inputs[1][i] + …), in this order, for `count` elements, and writes
// it to each of the `outputs`. An output may be one of the inputs.
template <typename Arithmetic>
void sum_to_all(const std::vector<const void*>& inputs, const std::vector<void*>& outputs,
                size_t count, double factor) {
  using Stored = typename Arithmetic::Stored;
  using Wide = typename Arithmetic::Wide;
  constexpr size_t kChunk = 2048;  // stays in the first cache
  alignas(64) Wide wide[kChunk];
  alignas(64) Stored result[kChunk];
  for (size_t at = 0; at < count; at += kChunk) {
    size_t n = count - at < kChunk ? count - at : kChunk;
    auto in = [&](size_t rank) { return static_cast<const Stored*>(inputs[rank]) + at; };
    constexpr bool plain = std::is_same<Wide, Stored>::value;
    if (inputs.size() == 2 && (plain || factor == 1.0)) {
      Arithmetic::add_two(result, in(0), in(1), n);
      if constexpr (plain) {
        scale<Arithmetic>(result, factor, n);
      }
    } else {
      Arithmetic::set(wide, in(0), n);
      for (size_t rank = 1; rank < inputs.size(); ++rank) {
        Arithmetic::add(wide, in(rank), n);
      }
      scale<Arithmetic>(wide, factor, n);
      Arithmetic::get(result, wide, n);
    }
    for (void* output : outputs) {
      std::memcpy(static_cast<Stored*>(output) + at, result, n * sizeof(Stored));
    }
  }
}

// The arithmetic of another reduction than the sum. NaNs are kept.
template <typename T, Reduction kReduction>
struct Other : Plain<T> {
  static T of(T a, T b) {
    if constexpr (kReduction == Reduction::kProduct && std::is_integral<T>::value) {
      using Unsigned = typename std::make_unsigned<T>::type;
      return (T)((Unsigned)a * (Unsigned)b);
    } else if constexpr (kReduction == Reduction::kProduct) {
      return a * b;
    } else {
      return a != a || (kReduction == Reduction::kMin ? a < b : a > b) ? a : b;
    }
  }
  static void add(T* result, const T* in, size_t n) { add_two(result, result, in, n); }
  static void add_two(T* out, const T* a, const T* b, size_t n) {
    for (size_t i = 0; i < n; ++i) {
      out[i] = of(a[i], b[i]);
    }
  }
};

template <typename T>
void reduce_to_all(Reduction reduction, const std::vector<const void*>& inputs, const std::vector<void*>& outputs,
                   size_t count) {
  switch (reduction) {
    case Reduction::kMin:
      return sum_to_all<Other<T, Reduction::kMin>>(inputs, outputs, count, 1.0);
    case Reduction::kMax:
      return sum_to_all<Other<T, Reduction::kMax>>(inputs, outputs, count, 1.0);
    default:
      return sum_to_all<Other<T, Reduction::kProduct>>(inputs, outputs, count, 1.0);
  }
}

// Whether `sum_to_all` has this reduction.
inline bool has_reduction(Element element, Reduction reduction) {
  return reduction == Reduction::kSum || (element != Element::kFloat16 && element != Element::kBfloat16);
}

inline void sum_to_all(Element element, const std::vector<const void*>& inputs,
                       const std::vector<void*>& outputs, size_t count, double factor,
                       Reduction reduction = Reduction::kSum) {
  if (reduction != Reduction::kSum) {
    switch (element) {
      case Element::kFloat32:
        return reduce_to_all<float>(reduction, inputs, outputs, count);
      case Element::kFloat64:
        return reduce_to_all<double>(reduction, inputs, outputs, count);
      case Element::kInt32:
        return reduce_to_all<int32_t>(reduction, inputs, outputs, count);
      default:
        return reduce_to_all<int64_t>(reduction, inputs, outputs, count);
    }
  }
  switch (element) {
    case Element::kFloat32:
      return sum_to_all<Plain<float>>(inputs, outputs, count, factor);
    case Element::kFloat64:
      return sum_to_all<Plain<double>>(inputs, outputs, count, factor);
    case Element::kFloat16:
      return sum_to_all<Half>(inputs, outputs, count, factor);
    case Element::kBfloat16:
      return sum_to_all<Bfloat16>(inputs, outputs, count, factor);
    case Element::kInt32:
      return sum_to_all<Plain<int32_t>>(inputs, outputs, count, factor);
    case Element::kInt64:
      return sum_to_all<Plain<int64_t>>(inputs, outputs, count, factor);
  }
}

}  // namespace hvdkit

#endif  // HVDKIT_HOST_SUMS_H
