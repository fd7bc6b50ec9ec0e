// Combine: summaries of segments -> the state at the end of each, in the contributions' place.
//
//   S_i = S_i-1 T_i + C_i      S_0 = C_0, which started from the initial state
//
// in plain fp32, sums in a fixed order. Rows of V never meet: a block takes kRows of them, of one
// sequence and head, and transitions stream through two stages of shared memory. In a product a
// warp takes 16 of K, a lane 4 columns of all rows; for its sum a warp takes one row in 8. Whatever
// kRows is the bits are the same.
//
// The gradient's reverse scan takes them from the last to the first, z = 1: its contributions and
// transitions come after the others.
//
// Grid: x = (sequence, value head), y = rows, z as above. Block: 8 warps, 167,952 bytes with 8
// rows, 204,816 with 16.
#pragma once

#include "chunk_fwd_segment_sm90.cuh"

namespace jax_kda::sm90 {

template <int kRows_>
struct CombineConfig {
  static constexpr int kRows = kRows_, kWarps = 8, kThreads = 32 * kWarps, kStages = 2;
  static constexpr int kPart = kHead / kWarps;     // of K, of a warp
  static constexpr int kOwnRows = kRows / kWarps;  // of a warp
  static_assert(kRows % kWarps == 0 && kHead == 32 * 4);

  // Shared memory, bytes; all numbers are fp32.
  static constexpr int kTransitions = 0;                            // [stages] [K, K]
  static constexpr int kStates = kTransitions + kStages * kState;   // [rows, K]
  static constexpr int kSums = kStates + kRows * kHead * 4;         // [warps] [rows, K]
  static constexpr int kFull = kSums + kWarps * kRows * kHead * 4;  // a barrier a stage
  static constexpr int kBytes = kFull + 8 * kStages;
};

template <int kRows>
__global__ void __launch_bounds__(CombineConfig<kRows>::kThreads, 1)
    ChunkFwdCombineKernel(const __grid_constant__ FwdParams p,
                          const __grid_constant__ Workspace ws) {
  using C = CombineConfig<kRows>;
  extern __shared__ __align__(1024) uint8_t shared[];
  const uint32_t smem = SharedAddress(shared);
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int64_t n = blockIdx.x / p.HV, h = blockIdx.x % p.HV;
  GriddepcontrolWait();
  GriddepcontrolLaunchDependents();  // only now: what it has left to wait for are the states
  const Segment sequence = FindTokens(p, ws, n);
  const int64_t last = SegmentsOf(p, sequence) - 1;  // nobody asks for the state at its end
  if (last < 2 || FindStateSlots(p, n).padding) return;
  const int64_t first = FirstSegment(p, n, sequence.first_chunk);
  const bool reverse = blockIdx.z == 1;
  auto segment_at = [&](int64_t i) {
    const int64_t number = first + (reverse ? ws.segments + last - i : i);
    return (number * p.HV + h) * kHead * kHead;
  };
  auto load_transition = [&](int64_t i) {  // by one thread
    const int stage = i % C::kStages;
    MbarrierExpectTx(smem + C::kFull + 8 * stage, kState);
    BulkLoad(smem + C::kTransitions + stage * kState, ws.transitions + segment_at(i), kState,
             smem + C::kFull + 8 * stage);
  };
  if (threadIdx.x == 0) {
    for (int i = 0; i < C::kStages; ++i) MbarrierInit(smem + C::kFull + 8 * i, 1);
    FenceMbarrierInit();
    for (int i = 1; i < last && i <= C::kStages; ++i) load_transition(i);
  }
  // This warp's rows are `warp` and, of 16, `warp` + 8.
  float* const own = ws.segment_states + (blockIdx.y * C::kRows + warp) * kHead + 4 * lane;
  auto own_at = [&](int64_t i, int r) {
    return reinterpret_cast<float4*>(own + segment_at(i) + r * C::kWarps * kHead);
  };
  const uint32_t own_state = smem + C::kStates + (warp * kHead + 4 * lane) * 4;
  float4 S[C::kOwnRows], next[C::kOwnRows];
#pragma unroll
  for (int r = 0; r < C::kOwnRows; ++r) S[r] = *own_at(0, r);
  for (int64_t i = 1; i < last; ++i) {
#pragma unroll
    for (int r = 0; r < C::kOwnRows; ++r) {
      next[r] = *own_at(i, r);  // the contribution
      Sts128(own_state + r * C::kWarps * kHead * 4,
             {__float_as_uint(S[r].x), __float_as_uint(S[r].y), __float_as_uint(S[r].z),
              __float_as_uint(S[r].w)});
    }
    __syncthreads();
    const int stage = i % C::kStages;
    MbarrierWait(smem + C::kFull + 8 * stage, (i - 1) / C::kStages & 1);
    const uint32_t transition = smem + C::kTransitions + stage * kState + lane * 16;
    float4 sums[C::kRows] = {};
#pragma unroll
    for (int k = 0; k < C::kPart; k += 4) {
      float4 T[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        T[j] = LdsF32x4(transition + (warp * C::kPart + k + j) * kHead * 4);
      }
#pragma unroll
      for (int row = 0; row < C::kRows; ++row) {
        const float4 x = LdsF32x4(smem + C::kStates + (row * kHead + warp * C::kPart + k) * 4);
        const float factors[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          sums[row].x = fmaf(factors[j], T[j].x, sums[row].x);
          sums[row].y = fmaf(factors[j], T[j].y, sums[row].y);
          sums[row].z = fmaf(factors[j], T[j].z, sums[row].z);
          sums[row].w = fmaf(factors[j], T[j].w, sums[row].w);
        }
      }
    }
    const uint32_t parts = smem + C::kSums + lane * 16;
#pragma unroll
    for (int row = 0; row < C::kRows; ++row) {
      Sts128(parts + (warp * C::kRows + row) * kHead * 4,
             {__float_as_uint(sums[row].x), __float_as_uint(sums[row].y),
              __float_as_uint(sums[row].z), __float_as_uint(sums[row].w)});
    }
    __syncthreads();
    if (threadIdx.x == 0 && i + C::kStages < last) load_transition(i + C::kStages);
#pragma unroll
    for (int r = 0; r < C::kOwnRows; ++r) {
      const uint32_t row = parts + (warp + r * C::kWarps) * kHead * 4;
#pragma unroll
      for (int part = 0; part < C::kWarps; ++part) {
        const float4 x = LdsF32x4(row + part * C::kRows * kHead * 4);
        next[r] = {next[r].x + x.x, next[r].y + x.y, next[r].z + x.z, next[r].w + x.w};
      }
      *own_at(i, r) = S[r] = next[r];
    }
  }
}

}  // namespace jax_kda::sm90
