// Combine: summaries of segments -> the state at the end of each, in the contributions' place.
//
//   S_i = S_i-1 T_i + C_i      S_0 = C_0, which started from the initial state
//
// in plain fp32, sums in a fixed order. Rows of V are independent: a block takes kRows of them, of
// one sequence and head. Thread (part, column) multiplies a quarter of K into its column; the part
// of the next transition that it needs is in registers before the current product is summed.
//
// Grid: x = (sequence, value head), y = rows.
#pragma once

#include "chunk_fwd_scan_sm90.cuh"

namespace jax_kda::sm90 {

struct CombineConfig {
  static constexpr int kRows = 4, kParts = 4, kThreads = kParts * kHead;
  static constexpr int kPart = kHead / kParts;  // rows of a transition a thread multiplies by
  static_assert(kRows == kParts, "a thread owns one element of the block's rows");
};

__global__ void __launch_bounds__(CombineConfig::kThreads, 1)
    ChunkFwdCombineKernel(const __grid_constant__ FwdParams p, const __grid_constant__ Workspace ws) {
  using C = CombineConfig;
  __shared__ float4 state[kHead];  // of K channel: its kRows elements
  __shared__ float sums[C::kParts][C::kRows][kHead];
  const int column = threadIdx.x % kHead, part = threadIdx.x / kHead;
  const int64_t n = blockIdx.x / p.HV, h = blockIdx.x % p.HV;
  GriddepcontrolLaunchDependents();
  GriddepcontrolWait();
  const Segment sequence = FindTokens(p, ws, n);
  const int64_t segments = SegmentsOf(p, sequence);
  if (segments < 3 || FindStateSlots(p, n).padding) return;
  const int64_t first = FirstSegment(n, sequence.first_chunk, p.segment_chunks);
  const int64_t row = blockIdx.y * C::kRows + part;  // thread (part, column) owns this element
  auto element = [&](int64_t i) -> float& {
    return ws.segment_states[(((first + i) * p.HV + h) * kHead + row) * kHead + column];
  };
  float transition[C::kPart];
  auto load_transition = [&](int64_t i) {
    const float* from =
        ws.transitions + (((first + i) * p.HV + h) * kHead + part * C::kPart) * kHead + column;
#pragma unroll
    for (int k = 0; k < C::kPart; ++k) transition[k] = from[k * kHead];
  };
  load_transition(1);
  float S = element(0), contribution = element(1);
  for (int64_t i = 1; i < segments - 1; ++i) {
    reinterpret_cast<float*>(&state[column])[part] = S;
    __syncthreads();
    float4 sum = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
    for (int k = 0; k < C::kPart; ++k) {
      const float4 s = state[part * C::kPart + k];
      sum.x = fmaf(s.x, transition[k], sum.x);
      sum.y = fmaf(s.y, transition[k], sum.y);
      sum.z = fmaf(s.z, transition[k], sum.z);
      sum.w = fmaf(s.w, transition[k], sum.w);
    }
    if (i + 1 < segments - 1) load_transition(i + 1);
    sums[part][0][column] = sum.x;
    sums[part][1][column] = sum.y;
    sums[part][2][column] = sum.z;
    sums[part][3][column] = sum.w;
    __syncthreads();
    S = contribution;
#pragma unroll
    for (int k = 0; k < C::kParts; ++k) S += sums[k][part][column];
    element(i) = S;
    if (i + 1 < segments - 1) contribution = element(i + 1);
  }
}

}  // namespace jax_kda::sm90
