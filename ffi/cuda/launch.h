// What the handlers call: one launcher an op and architecture. Host only; no kernel is visible
// here.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>

#include "../common/check.h"
#include "../common/params.h"

namespace jax_kda {

inline ffi::Error CudaError(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return ffi::Error::Success();
  return ffi::Error::Internal(std::string(what) + ": " + cudaGetErrorName(status) + ": " +
                              cudaGetErrorString(status));
}

// Slots of a pool that no sequence writes keep their states: a copy, where the result is not the
// operand's memory.
inline ffi::Error CopyPool(const FwdParams& p, cudaStream_t stream) {
  if (p.pools == 0 || p.final_state == nullptr || p.final_state == p.initial_state) {
    return ffi::Error::Success();
  }
  const size_t bytes = static_cast<size_t>(p.pools * p.slots * p.HV * p.V * p.K) *
                       (p.state_dtype == DType::kF32 ? 4 : 2);
  return CudaError(
      cudaMemcpyAsync(p.final_state, p.initial_state, bytes, cudaMemcpyDeviceToDevice, stream),
      "cudaMemcpyAsync");
}

// Bytes of FwdParams::workspace.
int64_t ChunkFwdWorkspaceBytes(int64_t B, int64_t T, int64_t HV, int64_t M, bool packed,
                               int64_t segment_chunks, int64_t slice_chunks);

// Enqueues the forward on `stream`: K and V of 64 or 128, q k v bf16, B T < 2^31. Neither allocates
// nor synchronises.
ffi::Error LaunchChunkFwdSm90(const FwdParams& p, cudaStream_t stream);

// Bytes of the workspace of the gradient for K = V = 128.
int64_t ChunkBwdWorkspaceBytes(int64_t B, int64_t T, int64_t H, int64_t HV, int64_t M, bool packed,
                               int64_t segment_chunks);

// Enqueues the gradient on `stream`: as the forward, fwd.workspace included. A state and its
// cotangent have one dtype. Neither allocates nor synchronises.
ffi::Error LaunchChunkBwdSm90(const BwdParams& b, cudaStream_t stream);

// Enqueues the recurrence on `stream`: K = 64, 128 or 256, any GPU from sm_80 on. Neither allocates
// nor synchronises.
ffi::Error LaunchRecurrentFwd(const FwdParams& p, cudaStream_t stream);

}  // namespace jax_kda
