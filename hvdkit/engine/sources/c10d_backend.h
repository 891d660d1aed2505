// hvdkit's backend of torch.distributed, for mpi_ops_v2.cc. Part of hvdkit (Apache-2.0).

#ifndef HVDKIT_C10D_BACKEND_H
#define HVDKIT_C10D_BACKEND_H

#include <torch/extension.h>

namespace hvdkit {

// Adds the function that makes a backend to the module.
void bind_c10d(pybind11::module& module);

}  // namespace hvdkit

#endif  // HVDKIT_C10D_BACKEND_H
