// Which state a sequence reads and which it writes, on the device: params.h has the rules.
#pragma once

#include <cstdint>

#include "../common/params.h"

namespace jax_kda {

// States, counted over all pools; -1: none.
struct StateSlots {
  int64_t read;
  int64_t write;
  bool padding;  // the sequence's tokens get o = 0, and no slot is touched
};

__device__ inline StateSlots FindStateSlots(const FwdParams& p, int64_t n) {
  if (p.pools == 0) {
    return {p.initial_state == nullptr ? -1 : n, p.final_state == nullptr ? -1 : n, false};
  }
  const int64_t pool = n / (p.B * p.M / p.pools);
  auto slot = [&](const int32_t* indices) -> int64_t {
    if (indices == nullptr || indices[n] < 0 || indices[n] >= p.slots) return -1;
    return pool * p.slots + indices[n];
  };
  const int64_t read = slot(p.state_indices);
  const int64_t write = p.output_state_indices == nullptr ? read : slot(p.output_state_indices);
  if ((p.state_indices == nullptr ? write : read) < 0) return {-1, -1, true};
  return {read, p.final_state == nullptr ? -1 : write, false};
}

// The slot for the state after `chunk` and all before it, or -1.
__device__ inline int64_t FindCheckpointSlot(const FwdParams& p, int64_t n, int64_t chunk) {
  const int32_t index = p.checkpoint_indices[n * (p.T / kChunk) + chunk];
  if (index < 0 || index >= p.slots) return -1;
  return n / (p.B * p.M / p.pools) * p.slots + index;
}

}  // namespace jax_kda
