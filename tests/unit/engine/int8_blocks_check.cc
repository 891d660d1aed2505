// int8_blocks.h with a C interface, for test_int8_blocks.py.

#include "int8_blocks.h"

extern "C" {

size_t bytes(size_t n) { return hvdkit::int8_bytes(n); }

void encode(void* out, const float* in, size_t n) { hvdkit::int8_encode(out, in, n); }

void decode(float* out, const void* in, size_t n) { hvdkit::int8_decode(out, in, n); }

}  // extern "C"
