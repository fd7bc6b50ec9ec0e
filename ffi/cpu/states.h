// Where the states of a sequence lie, in a pool or not, and the copies that need no kernel.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "ffi/common/slots.h"
#include "ffi/cpu/parallel.h"
#include "ffi/cpu/vec.h"

namespace jax_kda::cpu {

// ---- states of one head: [V, K], by their index in memory

// Head hv of a slot.
inline int64_t HeadState(const FwdParams& p, int64_t slot, int64_t hv) {
  return slot == kNoSlot ? kNoSlot : slot * p.HV + hv;
}

inline int64_t StateBytes(const FwdParams& p) {
  return p.V * p.K * (p.state_dtype == DType::kBF16 ? 2 : 4);
}

inline const std::byte* InitialState(const FwdParams& p, int64_t state) {
  return static_cast<const std::byte*>(p.initial_state) + state * StateBytes(p);
}

inline std::byte* FinalState(const FwdParams& p, int64_t state) {
  return static_cast<std::byte*>(p.final_state) + state * StateBytes(p);
}

// An empty sequence hands its state on bit by bit. The two may be the same memory.
inline void CopyState(const FwdParams& p, int64_t read, int64_t write) {
  if (write == kNoSlot) return;
  if (read == kNoSlot) {
    std::memset(FinalState(p, write), 0, StateBytes(p));
  } else {
    std::memmove(FinalState(p, write), InitialState(p, read), StateBytes(p));
  }
}

// The slots that nobody writes: final_state begins as initial_state.
inline void CopyPool(const FwdParams& p, const Executor& executor) {
  if (p.pools == 0 || p.final_state == nullptr || p.final_state == p.initial_state) return;
  constexpr int64_t kBlock = 1 << 20;
  const int64_t bytes = p.pools * p.slots * p.HV * StateBytes(p);
  ParallelFor(executor, (bytes + kBlock - 1) / kBlock, [&](int64_t item, int64_t) {
    const int64_t begin = item * kBlock;
    std::memcpy(static_cast<std::byte*>(p.final_state) + begin,
                static_cast<const std::byte*>(p.initial_state) + begin,
                std::min(kBlock, bytes - begin));
  });
}

// ---- strips: columns [strip * width, (strip + 1) * width) of V, K-first as [rows, width], zero
// beyond K and V

template <class T>
void LoadStrip(const FwdParams& p, const T* from, int64_t strip, int64_t width, float* S) {
  const int64_t begin = strip * width;
  const int64_t end = std::min(begin + width, p.V);
  for (int64_t v = begin; v < end; ++v) {
    for (int64_t k = 0; k < p.K; ++k) S[k * width + v - begin] = ToFloat(from[v * p.K + k]);
  }
}

// From a head's state, zeros where that is nullptr.
inline void LoadStrip(const FwdParams& p, DType dtype, const void* from, int64_t strip,
                      int64_t rows, int64_t width, float* S) {
  std::memset(S, 0, rows * width * sizeof(float));
  if (from == nullptr) return;
  if (dtype == DType::kBF16) {
    LoadStrip(p, static_cast<const BF16*>(from), strip, width, S);
  } else {
    LoadStrip(p, static_cast<const float*>(from), strip, width, S);
  }
}

template <class T>
void StoreStrip(const FwdParams& p, const float* S, int64_t strip, int64_t width, T* to) {
  const int64_t begin = strip * width;
  const int64_t end = std::min(begin + width, p.V);
  for (int64_t v = begin; v < end; ++v) {
    for (int64_t k = 0; k < p.K; ++k) FromFloat(S[k * width + v - begin], to[v * p.K + k]);
  }
}

inline void StoreStrip(const FwdParams& p, DType dtype, const float* S, int64_t strip,
                       int64_t width, void* to) {
  if (dtype == DType::kBF16) {
    StoreStrip(p, S, strip, width, static_cast<BF16*>(to));
  } else {
    StoreStrip(p, S, strip, width, static_cast<float*>(to));
  }
}

}  // namespace jax_kda::cpu
