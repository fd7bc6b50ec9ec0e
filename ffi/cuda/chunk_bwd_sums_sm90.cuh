// Sums: what the chunks of a row add to dA_log and ddt_bias, in one order whatever the grid is.
//
// Grid: x = (row, value head). Block: parts of 288 threads, of which 272 take a number each; part i
// adds up every kParts-th chunk from the i-th on, and the parts are added in order.
#pragma once

#include <cmath>

#include "chunk_bwd_sm90.cuh"

namespace jax_kda::sm90 {

struct SumsConfig {
  static constexpr int kParts = 3, kWidth = 288, kThreads = kParts * kWidth;
  static_assert(kWidth >= kParameterSums && kThreads <= 1024);
};

static __global__ void __launch_bounds__(SumsConfig::kThreads)
    ChunkBwdSumsKernel(const __grid_constant__ BwdParams b,
                       const __grid_constant__ BwdWorkspace ws) {
  using C = SumsConfig;
  __shared__ float parts[C::kParts][C::kWidth];
  const FwdParams& p = b.fwd;
  const int HV = static_cast<int>(p.HV), h = blockIdx.x % HV, row = blockIdx.x / HV;
  const int part = threadIdx.x / C::kWidth, i = threadIdx.x % C::kWidth;
  GriddepcontrolWait();
  int64_t first = row * (ws.fwd.NT / p.B), end = first + ws.fwd.NT / p.B;
  bool malformed = false;
  if (ws.fwd.sequences != nullptr) {  // those of its sequences, which lie side by side
    const SequenceSlot* sequences = ws.fwd.sequences + row * p.M;
    const SequenceSlot last = sequences[p.M - 1];
    first = sequences[0].first_chunk;
    end = last.first_chunk + (last.length + kChunk - 1) / kChunk;
    malformed = last.malformed;
  }
  float sum = 0.f;
  if (i < kParameterSums && p.gate != Gate::kActivated) {  // else nothing was written
    const float* from = ws.parameter_sums + h * kParameterSums + i;
#pragma unroll 16
    for (int64_t c = first + part; c < end; c += C::kParts) {
      sum += from[c * HV * kParameterSums];
    }
  }
  parts[part][i] = sum;
  __syncthreads();
  if (part > 0) return;
  for (int n = 1; n < C::kParts; ++n) sum += parts[n][i];
  if (malformed) sum = NAN;
  parts[0][i] = sum;
  BarSync(1, C::kWidth);
  if (i < kHead && b.ddt_bias != nullptr) {
    b.ddt_bias[int64_t{blockIdx.x} * kHead + i] = sum + parts[0][kHead + i];
  }
  if (i == 2 * kHead && b.dA_log != nullptr) {
    for (int w = i + 1; w < kParameterSums; ++w) sum += parts[0][w];
    b.dA_log[blockIdx.x] = sum;
  }
}

}  // namespace jax_kda::sm90
