// The Python module `_cpu`: handler capsules and the FFI version they were compiled for.
#include <nanobind/nanobind.h>

#include <utility>

#include "ffi/cpu/handlers.h"

namespace nb = nanobind;

NB_MODULE(_cpu, m) {
  m.def("handlers", [] {
    nb::dict handlers;
    handlers["kda_chunk_fwd"] = nb::capsule(reinterpret_cast<void*>(KdaChunkFwd));
    handlers["kda_chunk_bwd"] = nb::capsule(reinterpret_cast<void*>(KdaChunkBwd));
    handlers["kda_recurrent_fwd"] = nb::capsule(reinterpret_cast<void*>(KdaRecurrentFwd));
    return handlers;
  });
  m.def("api_version", [] { return nb::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR); });
}
