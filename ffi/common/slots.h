// Which state a sequence reads and which it writes, on the host and in CUDA kernels: the rules of
// params.h.
#pragma once

#include <cstdint>

#include "params.h"

#ifdef __CUDACC__
#define KDA_HOST_DEVICE __host__ __device__
#else
#define KDA_HOST_DEVICE
#endif

namespace jax_kda {

inline constexpr int64_t kNoSlot = -1;

// Indices of [HV, V, K] in initial_state and final_state, over all pools. kNoSlot: zeros are read,
// or nothing is written.
struct StateSlots {
  int64_t read;
  int64_t write;
  bool padding;  // the sequence's tokens get o = 0, and no slot is touched
};

KDA_HOST_DEVICE inline StateSlots FindStateSlots(const FwdParams& p, int64_t n) {
  if (p.pools == 0) {
    return {p.initial_state == nullptr ? kNoSlot : n, p.final_state == nullptr ? kNoSlot : n,
            false};
  }
  const int64_t pool = n / (p.B * p.M / p.pools);
  auto slot = [&](const int32_t* indices) -> int64_t {
    if (indices == nullptr || indices[n] < 0 || indices[n] >= p.slots) return kNoSlot;
    return pool * p.slots + indices[n];
  };
  const int64_t read = slot(p.state_indices);
  const int64_t write = p.output_state_indices == nullptr ? read : slot(p.output_state_indices);
  if ((p.state_indices == nullptr ? write : read) < 0) return {kNoSlot, kNoSlot, true};
  return {read, p.final_state == nullptr ? kNoSlot : write, false};
}

// The slot for the state after `chunk` and all before it, of a sequence that is not padding. Only
// where there are checkpoint_indices.
KDA_HOST_DEVICE inline int64_t FindCheckpointSlot(const FwdParams& p, int64_t n, int64_t chunk) {
  const int32_t index = p.checkpoint_indices[n * (p.T / kChunk) + chunk];
  if (index < 0 || index >= p.slots) return kNoSlot;
  return n / (p.B * p.M / p.pools) * p.slots + index;
}

}  // namespace jax_kda
