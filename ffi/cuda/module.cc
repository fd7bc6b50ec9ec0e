// Python module `_cuda`: hands out the handlers and what Python must know about them. Imports
// without a GPU or a driver.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>

#include <utility>

#include "ffi/cuda/launch.h"
#include "xla/ffi/api/ffi.h"

namespace nb = nanobind;

extern "C" XLA_FFI_Error* KdaChunkFwd(XLA_FFI_CallFrame* call_frame);
extern "C" XLA_FFI_Error* KdaChunkBwd(XLA_FFI_CallFrame* call_frame);
extern "C" XLA_FFI_Error* KdaRecurrentFwd(XLA_FFI_CallFrame* call_frame);

NB_MODULE(_cuda, m) {
  m.def("handlers", [] {
    nb::dict handlers;
    handlers["kda_chunk_fwd"] = nb::capsule(reinterpret_cast<void*>(&KdaChunkFwd));
    handlers["kda_recurrent_fwd"] = nb::capsule(reinterpret_cast<void*>(&KdaRecurrentFwd));
    handlers["kda_chunk_bwd"] = nb::capsule(reinterpret_cast<void*>(&KdaChunkBwd));
    return handlers;
  });
  m.def("api_version", [] { return std::pair<int, int>(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR); });
  m.def("chunk_fwd_workspace_bytes", &jax_kda::ChunkFwdWorkspaceBytes, nb::arg("B"), nb::arg("T"),
        nb::arg("HV"), nb::arg("M"), nb::arg("packed"), nb::arg("segment_chunks"),
        nb::arg("slice_chunks"));
  m.def("chunk_bwd_workspace_bytes", &jax_kda::ChunkBwdWorkspaceBytes, nb::arg("B"), nb::arg("T"),
        nb::arg("H"), nb::arg("HV"), nb::arg("M"), nb::arg("packed"), nb::arg("segment_chunks"));
}
