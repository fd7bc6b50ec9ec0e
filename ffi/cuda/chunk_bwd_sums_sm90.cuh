// Sums: what the chunks of a row add to dA_log and ddt_bias, in one order whatever the grid is.
//
// Grid: x = (row, value head), y = share: 32 channels of ddt_bias, of both halves of a chunk's
// tokens, or dA_log. Block: parts of 64 threads, a number each; part i adds up every kParts-th
// chunk from the i-th on, and the parts are added in order.
#pragma once

#include <cmath>

#include "chunk_bwd_sm90.cuh"

namespace jax_kda::sm90 {

struct SumsConfig {
  static constexpr int kParts = 16, kWidth = 64, kThreads = kParts * kWidth;
  static constexpr int kChannels = kWidth / 2, kShares = kHead / kChannels + 1;
  static constexpr int kOfALog = kParameterSums - 2 * kHead;  // numbers
  static_assert(kWidth >= kOfALog && kThreads <= 1024);
};

static __global__ void __launch_bounds__(SumsConfig::kThreads)
    ChunkBwdSumsKernel(const __grid_constant__ BwdParams b,
                       const __grid_constant__ BwdWorkspace ws) {
  using C = SumsConfig;
  __shared__ float parts[C::kParts][C::kWidth];
  const FwdParams& p = b.fwd;
  const int HV = static_cast<int>(p.HV), h = blockIdx.x % HV, row = blockIdx.x / HV;
  const int part = threadIdx.x / C::kWidth, i = threadIdx.x % C::kWidth;
  const bool of_A_log = blockIdx.y == C::kShares - 1;
  const int channel = blockIdx.y * C::kChannels + i % C::kChannels;
  const int number = of_A_log ? 2 * kHead + i : i / C::kChannels * kHead + channel;
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
  if (number < kParameterSums && p.gate != Gate::kActivated) {  // else nothing was written
    const float* from = ws.parameter_sums + h * kParameterSums + number;
#pragma unroll 8
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
  if (of_A_log) {
    if (i > 0 || b.dA_log == nullptr) return;
    for (int w = 1; w < C::kOfALog; ++w) sum += parts[0][w];
    b.dA_log[blockIdx.x] = sum;
  } else if (i < C::kChannels && b.ddt_bias != nullptr) {
    b.ddt_bias[int64_t{blockIdx.x} * kHead + channel] = sum + parts[0][i + C::kChannels];
  }
}

}  // namespace jax_kda::sm90
