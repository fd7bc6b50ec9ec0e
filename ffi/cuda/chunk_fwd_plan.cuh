// Plan: offsets of packed rows -> chunk slots and sequence slots, on one block.
//
// Offsets are data: nothing here or later may read or write out of bounds whatever they hold. A row
// whose offsets are malformed is planned as empty sequences with NaN results.
#pragma once

#include <cub/block/block_scan.cuh>

#include "chunk_fwd_sm90.cuh"

namespace jax_kda::sm90 {

inline constexpr int kPlanThreads = 1024;
// Up to this many sequences are scanned longest first; ranking more would cost more than it gains.
inline constexpr int kMaxRanked = 1024;

static __global__ void __launch_bounds__(kPlanThreads)
    ChunkFwdPlanKernel(const __grid_constant__ FwdParams p, const __grid_constant__ Workspace ws) {
  using Scan = cub::BlockScan<int, kPlanThreads>;
  __shared__ typename Scan::TempStorage scan_storage;
  __shared__ int chunk_counts[kMaxRanked];

  const int N = static_cast<int>(p.B * p.M), M = static_cast<int>(p.M), T = static_cast<int>(p.T);
  const int step = static_cast<int>(p.offsets_step);
  const int row_stride = step == 1 ? M + 1 : 2 * M;
  auto begin = [&](int n) {
    return p.offsets[int64_t{n / M} * row_stride + int64_t{n % M} * step];
  };
  auto end = [&](int n) {
    return p.offsets[int64_t{n / M} * row_stride + int64_t{n % M} * step + 1];
  };

  for (int n = threadIdx.x; n < N; n += kPlanThreads) ws.sequences[n].row_malformed = 0;
  __syncthreads();
  for (int n = threadIdx.x; n < N; n += kPlanThreads) {
    const int previous_end = n % M == 0 ? 0 : end(n - 1);
    const bool anchored = step == 2 || n % M != 0 || begin(n) == 0;
    if (!anchored || begin(n) < previous_end || end(n) < begin(n) || end(n) > T || begin(n) < 0) {
      atomicOr(&ws.sequences[n - n % M].row_malformed, 1);
    }
  }
  __syncthreads();

  int chunks_before = 0;  // in the sequences of earlier tiles
  for (int tile = 0; tile < N; tile += kPlanThreads) {
    const int n = tile + threadIdx.x;
    int chunks = 0;
    SequenceSlot s{};
    if (n < N) {
      const int row_token = n / M * T;
      const bool first = n % M == 0, last = n % M == M - 1;
      s.malformed = ws.sequences[n - n % M].row_malformed;
      if (s.malformed) {
        s.token = s.before = row_token;
        s.after = first ? row_token + T : row_token;
      } else {
        s.token = row_token + begin(n);
        s.length = end(n) - begin(n);
        s.before = row_token + (first ? 0 : end(n - 1));
        s.after = last ? row_token + T : s.token + s.length;
      }
      chunks = (s.length + kChunk - 1) / kChunk;
    }
    int before = 0, total = 0;
    Scan(scan_storage).ExclusiveSum(chunks, before, total);
    __syncthreads();  // scan_storage is reused, and row_malformed of this tile has been read
    if (n < N) {
      s.first_chunk = chunks_before + before;
      s.row_malformed = s.malformed;
      s.order = n;
      ws.sequences[n] = s;
      if (n < kMaxRanked) chunk_counts[n] = chunks;
    }
    chunks_before += total;
  }
  __syncthreads();

  for (int slot = threadIdx.x; slot < ws.NT; slot += kPlanThreads) {
    ChunkSlot c{};
    if (slot < chunks_before) {
      int low = 0, high = N - 1;  // the last sequence that starts at or before this slot; empty
                                  // ones share their start
      while (low < high) {
        const int middle = (low + high + 1) / 2;
        if (ws.sequences[middle].first_chunk <= slot) {
          low = middle;
        } else {
          high = middle - 1;
        }
      }
      const SequenceSlot s = ws.sequences[low];
      const int first = (slot - s.first_chunk) * kChunk;
      c = {s.token + first, min(kChunk, s.length - first), low / M, 0};
    }
    ws.chunks[slot] = c;
  }
  if (N <= kMaxRanked && static_cast<int>(threadIdx.x) < N) {
    const int n = threadIdx.x, mine = chunk_counts[n];
    int rank = 0;
    for (int other = 0; other < N; ++other) {
      rank += chunk_counts[other] > mine || (chunk_counts[other] == mine && other < n);
    }
    ws.sequences[rank].order = n;
  }
}

}  // namespace jax_kda::sm90
