// Scaling of bfloat16 buffers on CUDA GPUs, for Horovod's cuda_kernels.cu. Part of hvdkit
// (Apache-2.0).
//
// All arithmetic is in binary32 and rounded once, with a binary32 factor, as half_arithmetic.h does
// it: so the kernels run on any GPU architecture, with the same bits as on a CPU.

#ifndef HVDKIT_BFLOAT16_KERNELS_H
#define HVDKIT_BFLOAT16_KERNELS_H

#include <cstdint>
#include <cuda_runtime.h>

#if CUDART_VERSION >= 11000
#include <cuda_bf16.h>

namespace horovod {
namespace common {

__device__ inline __nv_bfloat16 scaled_bfloat16(__nv_bfloat16 value, float factor) {
  return __float2bfloat16(factor * __bfloat162float(value));
}

static __global__ void scale_bfloat16_k(const __nv_bfloat16* in, __nv_bfloat16* out, int64_t n,
                                        float factor) {
  const int64_t step = (int64_t)gridDim.x * blockDim.x;
  for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += step) {
    out[i] = scaled_bfloat16(in[i], factor);
  }
}

// Two at a time, for buffers aligned to 4 bytes.
static __global__ void scale_bfloat16_pairs_k(const __nv_bfloat16* in, __nv_bfloat16* out,
                                              int64_t n, float factor) {
  const int64_t first = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
  const int64_t step = (int64_t)gridDim.x * blockDim.x;
  auto* in_pairs = reinterpret_cast<const __nv_bfloat162*>(in);
  auto* out_pairs = reinterpret_cast<__nv_bfloat162*>(out);
  for (int64_t i = first; i < n / 2; i += step) {
    __nv_bfloat162 pair = in_pairs[i];
    pair.x = scaled_bfloat16(pair.x, factor);
    pair.y = scaled_bfloat16(pair.y, factor);
    out_pairs[i] = pair;
  }
  if (first == 0 && n % 2) {
    out[n - 1] = scaled_bfloat16(in[n - 1], factor);
  }
}

inline void scale_bfloat16(const void* in_, void* out_, int64_t n, double factor,
                           cudaStream_t stream) {
  auto* in = static_cast<const __nv_bfloat16*>(in_);
  auto* out = static_cast<__nv_bfloat16*>(out_);
  const int threads = 512;
  if ((uintptr_t)in % 4 == 0 && (uintptr_t)out % 4 == 0) {
    const int64_t blocks = ((n + 1) / 2 + threads - 1) / threads;
    scale_bfloat16_pairs_k<<<blocks, threads, 0, stream>>>(in, out, n, (float)factor);
  } else {
    const int64_t blocks = (n + threads - 1) / threads;
    scale_bfloat16_k<<<blocks, threads, 0, stream>>>(in, out, n, (float)factor);
  }
}

// An overload of Horovod's template, which needs bfloat16 arithmetic of the GPU. Word is the type of one
// memory access; `size` is in bytes.
template <typename Word, int blocks_per_copy>
__device__ void batched_scaled_memcpy_d(size_t idx, const __nv_bfloat16* in, __nv_bfloat16* out,
                                        size_t size, const float factor) {
  constexpr int values_per_word = sizeof(Word) / sizeof(__nv_bfloat16);
  const size_t words = size / sizeof(Word);
  auto* in_words = reinterpret_cast<const Word*>(in);
  auto* out_words = reinterpret_cast<Word*>(out);
  for (size_t i = idx; i < words; i += blockDim.x * blocks_per_copy) {
    Word word = in_words[i];
    auto* values = reinterpret_cast<__nv_bfloat16*>(&word);
    for (int j = 0; j < values_per_word; ++j) {
      values[j] = scaled_bfloat16(values[j], factor);
    }
    out_words[i] = word;
  }
  const size_t rest = words * values_per_word + idx;
  if (rest < size / sizeof(__nv_bfloat16)) {
    out[rest] = scaled_bfloat16(in[rest], factor);
  }
}

}  // namespace common
}  // namespace horovod

#endif  // CUDART_VERSION >= 11000

#endif  // HVDKIT_BFLOAT16_KERNELS_H
