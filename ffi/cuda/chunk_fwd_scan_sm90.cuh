// Scan: images of prepare, v, initial_state -> o, final_state. One block runs one sequence and
// value head, chunk by chunk:
//
//   r     = v - k_decayed S        v_new = A_inv r
//   o     = scale (q_decayed S + Aqk v_new)
//   S    <- diag(exp(G_last)) S + k_restored^T v_new
//
// All matrices are held transposed, so that S^T [V rows, K] stays in wgmma accumulators, 64 V rows
// a warpgroup, and what was an accumulator becomes the next product's left operand in registers. S
// is fp32 from the first chunk to the last.
//
// A slice or a segment of a sequence runs the same way from the state before it. What a segment
// does to a state, S T + C, comes from the same loop without o: C from zeros, and T, since the rows
// of S^T never meet, from the rows of the identity with v = 0. The first segment needs no T, since
// its C starts from the initial state. That state is kept in T's place: the last segment may have
// written the final state over it before the first one is scanned.
//
// Heads of 64 are heads of 128 whose other channels are zero: the copy engine fills them in, and
// states are read and written without them.
//
// Both halves of V need all of an image but its values. Where they are two blocks, these are a
// pair: a cluster, in which each block loads half of what both need into both. They do the same
// chunks, so each knows what the other loads. A block fills a stage of its peer when both have
// told each other that theirs are free.
//
// Grid: x = (scan order or segment, value head); y = V half when kWarpgroups is 1; of summaries,
// contribution or transition. Block: kWarpgroups state warpgroups and one that loads and stores, up
// to 231,128 bytes of shared memory: rings of operands, value tiles and matrices.
#pragma once

#include <cmath>
#include <type_traits>

#include "../common/slots.h"
#include "chunk_fwd_segment_sm90.cuh"

namespace jax_kda::sm90 {

template <int kWarpgroups_, bool kOutput_, bool kPaired_ = false>
struct ScanConfig {
  static constexpr int kWarpgroups = kWarpgroups_;  // 2: all of V; 1: half of it
  static constexpr bool kOutput = kOutput_;         // false: a summary, of the state alone
  static constexpr bool kPaired = kPaired_;         // with the block of V's other half
  static_assert(!kPaired || (kWarpgroups == 1 && kOutput));
  static constexpr int kThreads = (kWarpgroups + 1) * 128;
  static constexpr int kStages = kOutput ? 3 : 4;  // of operands and values
  static constexpr int kMatrixStages = kOutput ? 2 : 3;
  // [q_decayed] k_decayed k_restored, and A_inv [Aqk]
  static constexpr int kFirstOperand = kOutput ? image::kQDecayed : image::kKDecayed;
  static constexpr int kOperandBytes = image::kAInv - kFirstOperand,
                       kMatrixBytes = kOutput ? 2 * kMatrix : kMatrix;
  static constexpr int kKDecayed = image::kKDecayed - kFirstOperand,
                       kKRestored = image::kKRestored - kFirstOperand;

  // Shared memory, bytes. A value tile is overwritten by the output of its chunk.
  static constexpr int kOperands = 0;
  static constexpr int kValues = kOperands + kStages * kOperandBytes;
  static constexpr int kMatrices = kValues + kStages * kTile;
  static constexpr int kDecays = kMatrices + kMatrixStages * kMatrixBytes;
  static constexpr int kBarriers = kDecays + kStages * image::kDecayBytes;
  // full: the copy engine -> state warps; empty: state warps, or who stores a tile's output, -> the
  // loading thread
  static constexpr int kFull = kBarriers, kOperandsEmpty = kFull + 8 * kStages,
                       kValuesEmpty = kOperandsEmpty + 8 * kStages;
  static constexpr int kMatricesFull = kValuesEmpty + 8 * kStages,
                       kMatricesEmpty = kMatricesFull + 8 * kMatrixStages;
  static constexpr int kOutputsFull = kMatricesEmpty + 8 * kMatrixStages;
  // of a pair: the peer's loading thread, whose stage is empty -> this block's
  static constexpr int kOperandsPeer = kOutputsFull + 8 * kStages * kWarpgroups,
                       kMatricesPeer = kOperandsPeer + (kPaired ? 8 * kStages : 0);
  static constexpr int kBytes = kMatricesPeer + (kPaired ? 8 * kMatrixStages : 0);
  // a state warpgroup -> the thread that stores its outputs
  static __device__ constexpr int OutputFull(int stage, int warpgroup) {
    return kOutputsFull + 8 * (stage * kWarpgroups + warpgroup);
  }
  static_assert(kBytes <= 232448, "shared memory a block may ask for on sm_90");
};

// A ring's position: which stage, and the parity of its next completion.
template <int kStages>
struct Ring {
  int stage = 0;
  uint32_t parity = 0;
  __device__ void Advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// Operands in fp16 need values within its range. o and S are linear in (v, S), so a warp holds both
// divided by a power of two, which is exact. `bound` is above the norm of every row of this warp's
// part of S, now and at the chunk's end: for |k| <= 1 and decay <= 1 a row |s|^2 grows by at most
// v_t^2 a token when beta <= 1, and |s| by at most 2 |v_t| when beta <= 2. Scaled, it lies in
// [2^6, 2^14): in steps of 8, so that the power hardly ever changes. It follows from the state at
// the chunk's start and from v alone: a segment gives the same bits however it is cut into calls.
struct StateScale {
  int exponent = 0;
  float down = 1.f, up = 1.f;

  static constexpr float kSqrtHead = 11.32f;  // norm of a row over its largest element

  // Largest absolute value over the warp; values that are not finite do not count.
  static __device__ float WarpMax(float x) {
    const float m = __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(x)));
    return m < INFINITY ? m : 0.f;
  }
  __device__ float StateBound(const float (&S)[64]) const {
    float m = 0.f;
#pragma unroll
    for (int i = 0; i < 64; ++i) m = fmaxf(m, fabsf(S[i]));
    return kSqrtHead * WarpMax(m) * up;
  }
  // The same from S as packed operand: with the same bits for any power that keeps it in range.
  __device__ float StateBound(const uint32_t (&a)[32]) const {
    uint32_t m = 0;
#pragma unroll
    for (int i = 0; i < 32; ++i) m = MaxAbsFp16X2(m, a[i]);
    const float2 pair = __half22float2(*reinterpret_cast<const __half2*>(&m));
    return kSqrtHead * WarpMax(fmaxf(fabsf(pair.x), fabsf(pair.y))) * up;
  }
  // How much a chunk with values v adds to the bound: sqrt(64) or 2 * 64 times the largest.
  static __device__ float Growth(const uint32_t (&v)[16], BetaMode mode) {
    uint32_t m = 0;
#pragma unroll
    for (int i = 0; i < 16; ++i) m = MaxBf16X2(m, v[i] & 0x7fff7fffu);
    return (mode == BetaMode::kSigmoid ? 8.f : 128.f) * WarpMax(fmaxf(Bf16Lo(m), Bf16Hi(m)));
  }
  // Scales S for this bound; whether that changed it.
  __device__ bool Rescale(float (&S)[64], float bound) {
    const int floor8 = (static_cast<int>(__float_as_uint(bound) >> 23) + 1) / 8 * 8 - 128;
    const int wanted = bound == 0.f ? 0 : max(floor8 - 6, -100);
    if (wanted == exponent) return false;
    exponent = wanted;
    const float new_down = __uint_as_float(static_cast<uint32_t>(127 - wanted) << 23);
    const float factor = new_down * up;
#pragma unroll
    for (int i = 0; i < 64; ++i) S[i] *= factor;
    down = new_down;
    up = __uint_as_float(static_cast<uint32_t>(127 + wanted) << 23);
    return true;
  }
};

// This thread's part of S^T: rows g and g + 8 of its warp's 16, columns 8 j + 2 t and 8 j + 2 t + 1
// for j = 0..15. `at` is the element of `states`, of rows of K, at row g, column 2 t; zeros if it
// is negative.
__device__ inline void LoadState(float (&S)[64], const void* states, DType dtype, int K,
                                 int64_t at) {
#pragma unroll
  for (int j = 0; j < 32; ++j) {
    const int64_t i = at + (j & 1) * 8 * K + (j >> 1) * 8;
    float2 x = {0.f, 0.f};
    if (at >= 0 && (j < 16 || K > 64)) {
      if (dtype == DType::kF32) {
        x = *reinterpret_cast<const float2*>(static_cast<const float*>(states) + i);
      } else {
        const uint32_t pair =
            *reinterpret_cast<const uint32_t*>(static_cast<const __nv_bfloat16*>(states) + i);
        x = {Bf16Lo(pair), Bf16Hi(pair)};
      }
    }
    S[2 * j] = x.x;
    S[2 * j + 1] = x.y;
  }
}
__device__ inline void StoreState(const float (&S)[64], float up, void* states, DType dtype, int K,
                                  int64_t at) {
#pragma unroll
  for (int j = 0; j < 32; ++j) {
    if (j >= 16 && K <= 64) break;
    const int64_t i = at + (j & 1) * 8 * K + (j >> 1) * 8;
    const float2 x = {S[2 * j] * up, S[2 * j + 1] * up};
    if (dtype == DType::kF32) {
      *reinterpret_cast<float2*>(static_cast<float*>(states) + i) = x;
    } else {
      *reinterpret_cast<uint32_t*>(static_cast<__nv_bfloat16*>(states) + i) = Pack<Bf16>(x.x, x.y);
    }
  }
}
// The identity: `row` is that of accumulators 0 and 1, `column` that of accumulator 0.
__device__ inline void SetIdentity(float (&S)[64], int row, int column) {
#pragma unroll
  for (int i = 0; i < 64; ++i) {
    S[i] = row + (i >> 1 & 1) * 8 == column + (i >> 2) * 8 + (i & 1) ? 1.f : 0.f;
  }
}

// o of this warpgroup's 64 columns at tokens [first, last): zeros, or NaN.
__device__ inline void FillOutput(const FwdParams& p, int first, int last, int h, int v_half,
                                  bool nan, int thread) {
  const uint32_t pair = nan ? 0x7fc07fc0u : 0u;
  for (int token = first + (thread >> 3); token < last; token += 16) {
    __nv_bfloat16* o = static_cast<__nv_bfloat16*>(p.o) + (int64_t{token} * p.HV + h) * p.V +
                       v_half * 64 + (thread & 7) * 8;
    *reinterpret_cast<uint4*>(o) = {pair, pair, pair, pair};
  }
}

// A part of an image, for this block or for both of a pair.
template <typename Config>
__device__ __forceinline__ void LoadPart(uint32_t to, const std::byte* from, uint32_t bytes,
                                         uint32_t full) {
  if constexpr (Config::kPaired) {
    BulkLoadMulticast(to, from, bytes, full, /*ranks=*/3);
  } else {
    BulkLoad(to, from, bytes, full);
  }
}
// A triangle of an image, below the zeros that are kept in shared memory.
template <typename Config>
__device__ __forceinline__ void LoadTriangle(uint32_t to, const std::byte* from, uint32_t full) {
#pragma unroll
  for (int j = 0; j < triangle::kSlabs; ++j) {
    LoadPart<Config>(to + j * triangle::kSlab + triangle::Zeros(j), from + triangle::Slab(j),
                     triangle::Size(j), full);
  }
}

// By a pair's loading threads, each when its stage is empty and its `full` expects the next chunk:
// waits until both are. A second arrival cannot overtake the wait for the first: the peer's stage
// is not empty again before this thread has filled it. The last arrival is waited for as well, and
// all that lands by the state warps, so that a block needs not stay for its peer.
//
// The reads of a stage were over before its state warps arrived, and nothing was written that the
// peer reads: no fence of the cluster is needed.
__device__ __forceinline__ void MeetPeer(uint32_t bar, uint32_t rank, uint32_t parity) {
  MbarrierArriveCluster(Mapa(bar, rank ^ 1));
  MbarrierWait(bar, parity);
}

// Of a pair, the block of V half `first_half` loads that half of the operands, and decays and A_inv
// or Aqk. The first chunks go into stages that have always been empty: what then comes from the
// peer before `full` expects it counts below zero, in the same phase.
template <typename Config>
__device__ void LoadChunks(uint32_t smem, const CUtensorMap* v_map, const FwdParams& p,
                           const Workspace& ws, const Segment& s, int h, int first_half,
                           bool with_values) {
  using C = Config;
  Ring<C::kStages> inputs;
  Ring<C::kMatrixStages> matrices;
  constexpr int kOperandPart = C::kOperandBytes / (C::kPaired ? 2 : 1);
  const int part = C::kPaired ? first_half * kOperandPart : 0;
  const bool loads_first = !C::kPaired || first_half == 0,
             loads_second = !C::kPaired || first_half == 1;
  const int NT = (s.length + kChunk - 1) / kChunk;
  for (int c = 0; c < NT; ++c) {
    const std::byte* image = ws.images + ((s.first_chunk + c) * p.HV + h) * image::kBytes;
    {
      const uint32_t full = smem + C::kFull + 8 * inputs.stage;
      if (c >= C::kStages) {
        MbarrierWait(smem + C::kOperandsEmpty + 8 * inputs.stage, inputs.parity ^ 1);
      }
      MbarrierExpectTx(full, C::kOperandBytes + image::kDecayBytes +
                                 (with_values ? C::kWarpgroups * kHalfTile : 0));
      if (C::kPaired && c >= C::kStages) {
        MeetPeer(smem + C::kOperandsPeer + 8 * inputs.stage, first_half, inputs.parity ^ 1);
      }
      LoadPart<C>(smem + C::kOperands + inputs.stage * C::kOperandBytes + part,
                  image + C::kFirstOperand + part, kOperandPart, full);
      if (loads_first) {
        LoadPart<C>(smem + C::kDecays + inputs.stage * image::kDecayBytes, image + image::kDecay,
                    image::kDecayBytes, full);
      }
      if (with_values) {
        if (c >= C::kStages) {
          MbarrierWait(smem + C::kValuesEmpty + 8 * inputs.stage, inputs.parity ^ 1);
        }
        TmaLoad(smem + C::kValues + inputs.stage * kTile, v_map, full, h, s.token + c * kChunk,
                first_half);
      }
      inputs.Advance();
    }
    {
      const uint32_t full = smem + C::kMatricesFull + 8 * matrices.stage;
      if (c >= C::kMatrixStages) {
        MbarrierWait(smem + C::kMatricesEmpty + 8 * matrices.stage, matrices.parity ^ 1);
      }
      const uint32_t to = smem + C::kMatrices + matrices.stage * C::kMatrixBytes;
      MbarrierExpectTx(full, (C::kOutput ? 2 : 1) * triangle::kBytes);
      if (C::kPaired && c >= C::kMatrixStages) {
        MeetPeer(smem + C::kMatricesPeer + 8 * matrices.stage, first_half, matrices.parity ^ 1);
      }
      if (loads_first) LoadTriangle<C>(to, image + image::kAInv, full);
      if (C::kOutput && loads_second) LoadTriangle<C>(to + kMatrix, image + image::kAqk, full);
      matrices.Advance();
    }
  }
}

// S -> the left operand of this chunk, and S decayed to its end.
template <typename Operand>
__device__ __forceinline__ void PackState(uint32_t (&a)[32], float (&S)[64], StateScale& scale,
                                          float growth, uint32_t decays, int t) {
#pragma unroll
  for (int i = 0; i < 32; ++i) a[i] = Pack<Operand>(S[2 * i], S[2 * i + 1]);
  // Twice where a state that shrank was too small to tell how small.
  for (int i = 0; std::is_same_v<Operand, Fp16> && i < 2; ++i) {
    if (!scale.Rescale(S, scale.StateBound(a) + growth)) break;
#pragma unroll
    for (int j = 0; j < 32; ++j) a[j] = Pack<Operand>(S[2 * j], S[2 * j + 1]);
  }
#pragma unroll
  for (int j = 0; j < 16; ++j) {
    const float2 decay = LdsF32x2(decays + (8 * j + 2 * t) * 4);
    S[4 * j] *= decay.x;
    S[4 * j + 1] *= decay.y;
    S[4 * j + 2] *= decay.x;
    S[4 * j + 3] *= decay.y;
  }
}

// Where this lane addresses v^T or o^T fragments in a tile: matrices (tokens 0-7, V 0-7), (0-7, V
// 8-15), (8-15, V 0-7), (8-15, V 8-15) of 16 tokens and this warp's V.
__device__ __forceinline__ uint32_t ValueFragment(int warp, int lane) {
  return Swizzled((lane & 7) + ((lane >> 4) & 1) * 8, warp * 2 + ((lane >> 3) & 1));
}

// This thread's part of a chunk's o^T (rows V) -> o, through the tile whose values it takes the
// place of: the whole warp has read them. Whole chunks leave by StoreOutputs.
template <typename Config>
__device__ __forceinline__ void PackOutput(uint32_t smem, const FwdParams& p, const Segment& s,
                                           int h, int v_half, int c, int stage,
                                           const float (&O)[32], float scale) {
  const int thread = threadIdx.x & 127, warpgroup = threadIdx.x >> 7;
  const int token = s.token + c * kChunk, valid = s.length - c * kChunk;
  const uint32_t tile = smem + Config::kValues + stage * kTile + warpgroup * kHalfTile;
  const uint32_t fragment = tile + ValueFragment(thread >> 5, thread & 31);
  __syncwarp();
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    uint32_t o[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      o[i] = Pack<Bf16>(O[8 * j + 2 * i] * scale, O[8 * j + 2 * i + 1] * scale);
    }
    StmatrixTrans(fragment + j * 16 * 128, o[0], o[1], o[2], o[3]);
  }
  if (valid >= kChunk) {
    MbarrierArrive(smem + Config::OutputFull(stage, warpgroup));
  } else {  // the rows after `valid` are not ours to write
    BarSync(1 + warpgroup, 128);
    for (int row = thread >> 3; row < valid; row += 16) {
      __nv_bfloat16* o =
          static_cast<__nv_bfloat16*>(p.o) + (int64_t{token + row} * p.HV + h) * p.V + v_half * 64;
      *reinterpret_cast<uint4*>(o + (thread & 7) * 8) = Lds128(tile + Swizzled(row, thread & 7));
    }
  }
}

// Whole chunks of o of one state warpgroup, by one thread: a tile that has left can be loaded
// again.
template <typename Config>
__device__ void StoreOutputs(uint32_t smem, const CUtensorMap* o_map, const Segment& s, int h,
                             int v_half, int warpgroup) {
  using C = Config;
  Ring<C::kStages> values;
  for (int c = 0; c < s.length / kChunk; ++c) {
    MbarrierWait(smem + C::OutputFull(values.stage, warpgroup), values.parity);
    FenceProxyAsync();  // for all that arrived: theirs would hold up their chains
    TmaStore(o_map, smem + C::kValues + values.stage * kTile + warpgroup * kHalfTile, h,
             s.token + c * kChunk, v_half);
    BulkCommit();
    BulkWaitRead();
    MbarrierArrive(smem + C::kValuesEmpty + 8 * values.stage);
    values.Advance();
  }
  BulkWait();
}

// The state warpgroup of 64 V columns `v_half`; `warpgroup` is its place in the block.
// `transition`: those columns are rows of the identity, and no value is written.
template <typename Operand, typename Config>
__device__ void ScanChunks(uint32_t smem, const FwdParams& p, const Workspace& ws, const Segment& s,
                           int h, int v_half, int warpgroup, bool transition) {
  using C = Config;
  constexpr bool kScaled = std::is_same_v<Operand, Fp16>;
  const int thread = threadIdx.x & 127, warp = thread >> 5, lane = thread & 31, g = lane >> 2,
            t = lane & 3;
  const int row = v_half * 64 + warp * 16 + g;
  const int K = static_cast<int>(p.K);
  auto state_at = [&](int64_t slot) {
    return slot < 0 || row >= p.V ? -1 : ((slot * p.HV + h) * p.V + row) * K + 2 * t;
  };
  auto segment_at = [&](int64_t number) {
    return ((number * p.HV + h) * kHead + row) * kHead + 2 * t;
  };
  float S[64];
  if (s.first && (s.last || !C::kOutput || p.slice_chunks > 0)) {
    LoadState(S, p.initial_state, p.state_dtype, K, state_at(s.slots.read));
  } else if (p.slice_chunks > 0) {
    LoadState(S, ws.slice_states, DType::kF32, kHead, segment_at(s.n));
  } else if (C::kOutput) {
    LoadState(S, s.first ? ws.transitions : ws.segment_states, DType::kF32, kHead,
              segment_at(s.first ? s.number : s.number - 1));
  } else if (transition) {
    SetIdentity(S, row, 2 * t);
  } else {
    LoadState(S, nullptr, DType::kF32, kHead, -1);
  }
  StateScale state_scale;
  if (kScaled) state_scale.Rescale(S, state_scale.StateBound(S));

  const uint32_t fragment = ValueFragment(warp, lane);
  const int tile_half = warpgroup * kHalfTile;
  Ring<C::kStages> inputs;
  Ring<C::kMatrixStages> matrices;
  const int NT = (s.length + kChunk - 1) / kChunk;
  uint32_t u[16];  // v^T, then r, then v_new, as left operand
  float growth = 0.f;
  // Waits for chunk c, at the rings' positions, and takes its values.
  auto take_values = [&](uint32_t (&to)[16], int c) {
    MbarrierWait(smem + C::kFull + 8 * inputs.stage, inputs.parity);
    if (C::kOutput || !transition) {
      const uint32_t value = smem + C::kValues + inputs.stage * kTile + tile_half;
#pragma unroll
      for (int j = 0; j < 4; ++j) LdmatrixTrans(&to[4 * j], value + fragment + j * 16 * 128);
      if (!C::kOutput) MbarrierArrive(smem + C::kValuesEmpty + 8 * inputs.stage);
    } else {
#pragma unroll
      for (uint32_t& pair : to) pair = 0;
    }
    const int valid = s.length - c * kChunk;
    if (C::kOutput && valid < kChunk) {  // no segment is summarised whose chunks are not whole
      // Tokens of another sequence, or none: selected away, since they may hold NaN.
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        const int column = (i >> 1) * 8 + 2 * t;
        to[i] = column >= valid ? 0u : column + 1 >= valid ? to[i] & 0xffffu : to[i];
      }
    }
    if (kScaled) {
      const uint2 writes = Lds64(smem + C::kDecays + inputs.stage * image::kDecayBytes + kHead * 4);
      if ((writes.x & writes.y) != ~0u) {
        // What is not written shall not move the scale. NaN stays NaN.
#pragma unroll
        for (int i = 0; i < 16; ++i) {
          const uint32_t pair = (i < 8 ? writes.x : writes.y) >> ((i >> 1 & 3) * 8 + 2 * t);
          to[i] = MulX2<Bf16>(to[i], (pair & 1 ? 0x3f80u : 0u) | (pair & 2 ? 0x3f800000u : 0u));
        }
      }
      growth = StateScale::Growth(to, p.beta_mode);
    }
  };
  for (int c = 0; c < NT; ++c) {
    take_values(u, c);
    const uint32_t operand = smem + C::kOperands + inputs.stage * C::kOperandBytes;
    const uint32_t matrix = smem + C::kMatrices + matrices.stage * C::kMatrixBytes;
    const uint32_t decays = smem + C::kDecays + inputs.stage * image::kDecayBytes;

    float R[32], O[32];
    uint32_t a[32];
    PackState<Operand>(a, S, state_scale, growth, decays, t);
    // A step of 16 channels is 32 bytes on, 4 steps are a half tile; descriptors count in 16 bytes.
    const uint64_t q_decayed = WgmmaDescriptor(operand, 16),
                   k_decayed = WgmmaDescriptor(operand + C::kKDecayed, 16);
    auto channels = [](int i) { return uint64_t{(i >> 2) * (kHalfTile >> 4) + (i & 3) * 2u}; };
    WgmmaFence();
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      Wgmma64x64<Operand>(R, &a[4 * i], k_decayed + channels(i), i > 0);
    }
    WgmmaCommit();
    // The chain is R, A_inv, S: what o has of the state fills the tensor cores in between.
    if constexpr (C::kOutput) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        Wgmma64x64<Operand>(O, &a[4 * i], q_decayed + channels(i), i > 0);
      }
      WgmmaCommit();
    }
    MbarrierWait(smem + C::kMatricesFull + 8 * matrices.stage, matrices.parity);
    WgmmaWait<C::kOutput ? 1 : 0>();
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      u[i] = Pack<Operand>(fmaf(Bf16Lo(u[i]), state_scale.down, -R[2 * i]),
                           fmaf(Bf16Hi(u[i]), state_scale.down, -R[2 * i + 1]));
    }
    const uint64_t A_inv = WgmmaDescriptor<triangle::kRow>(matrix, 16),
                   Aqk = WgmmaDescriptor<triangle::kRow>(matrix + kMatrix, 16);
    constexpr int kSlabStep = triangle::kSlab >> 4;
    const uint64_t k_restored = WgmmaDescriptor(operand + C::kKRestored, kHalfTile);
    WgmmaFence();
#pragma unroll
    for (int i = 0; i < 4; ++i) Wgmma64x64<Operand>(R, &u[4 * i], A_inv + i * kSlabStep, i > 0);
    WgmmaCommit();
    if constexpr (C::kOutput) {
#pragma unroll
      for (int i = 4; i < 8; ++i) {
        Wgmma64x64<Operand>(O, &a[4 * i], q_decayed + channels(i), 1);
      }
      WgmmaCommit();
    }
    WgmmaWait<C::kOutput ? 1 : 0>();
#pragma unroll
    for (int i = 0; i < 16; ++i) u[i] = Pack<Operand>(R[2 * i], R[2 * i + 1]);
    WgmmaFence();
    if constexpr (C::kOutput) {
#pragma unroll
      for (int i = 0; i < 4; ++i) Wgmma64x64<Operand>(O, &u[4 * i], Aqk + i * kSlabStep, 1);
      WgmmaCommit();
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      Wgmma64x128Trans<Operand>(S, &u[4 * i], k_restored + i * (16 * 128 >> 4));
    }
    WgmmaCommit();
    if constexpr (C::kOutput) {
      WgmmaWait<1>();
      PackOutput<C>(smem, p, s, h, v_half, c, inputs.stage, O, p.scale * state_scale.up);
    }
    WgmmaWait<0>();
    if (C::kOutput && p.checkpoint_indices != nullptr && s.length - c * kChunk >= kChunk) {
      const int64_t slot = FindCheckpointSlot(p, s.n, s.chunk + c);
      if (slot >= 0) {
        StoreState(S, state_scale.up, p.final_state, p.state_dtype, K, state_at(slot));
      }
    }
    __syncwarp();
    MbarrierArrive(smem + C::kOperandsEmpty + 8 * inputs.stage);
    if (lane == 0) MbarrierArrive(smem + C::kMatricesEmpty + 8 * matrices.stage);
    inputs.Advance();
    matrices.Advance();
  }
  if constexpr (C::kOutput) {
    if (s.last && s.slots.write >= 0) {
      if (s.malformed) {
#pragma unroll
        for (int i = 0; i < 64; ++i) S[i] = NAN;
      }
      StoreState(S, state_scale.up, p.final_state, p.state_dtype, K, state_at(s.slots.write));
    }
    if (!s.last && p.slice_chunks > 0) {
      StoreState(S, state_scale.up, ws.slice_states, DType::kF32, kHead, segment_at(s.n));
    }
  } else {
    StoreState(S, state_scale.up, transition ? ws.transitions : ws.segment_states, DType::kF32,
               kHead, segment_at(s.number));
  }
}

// By all threads: zeros above the triangles, where no load writes, and the rings' barriers.
template <typename Config>
__device__ void InitRings(uint32_t smem) {
  using C = Config;
  for (int at = threadIdx.x * 16; at < C::kMatrixStages * C::kMatrixBytes; at += C::kThreads * 16) {
    Sts128(smem + C::kMatrices + at, {0, 0, 0, 0});
  }
  FenceProxyAsync();
  if (threadIdx.x > 0) return;
  for (int i = 0; i < C::kStages; ++i) {
    MbarrierInit(smem + C::kFull + 8 * i, 1);
    MbarrierInit(smem + C::kOperandsEmpty + 8 * i, 128 * C::kWarpgroups);
    MbarrierInit(smem + C::kValuesEmpty + 8 * i, C::kWarpgroups * (C::kOutput ? 1 : 128));
  }
  for (int i = 0; C::kOutput && i < C::kStages * C::kWarpgroups; ++i) {
    MbarrierInit(smem + C::kOutputsFull + 8 * i, 128);
  }
  for (int i = 0; i < C::kMatrixStages; ++i) {
    MbarrierInit(smem + C::kMatricesFull + 8 * i, 1);
    MbarrierInit(smem + C::kMatricesEmpty + 8 * i, 4 * C::kWarpgroups);
  }
  for (int i = 0; C::kPaired && i < C::kStages + C::kMatrixStages; ++i) {
    MbarrierInit(smem + C::kOperandsPeer + 8 * i, 1);  // and of the matrices, behind them
  }
  FenceMbarrierInit();
}

// Two state warpgroups share the registers: 2 x 128 x 232 + 128 x 40 are the 384 x 168 of the
// launch. One has 255 as it is.
template <typename Config>
__device__ __forceinline__ void StateRegisters() {
  if constexpr (Config::kWarpgroups == 2) SetMaxNRegInc<232>();
}
template <typename Config>
__device__ __forceinline__ void LoaderRegisters() {
  if constexpr (Config::kWarpgroups == 2) SetMaxNRegDec<40>();
}

template <typename Operand, int kWarpgroups, bool kPaired>
__global__ void __launch_bounds__(ScanConfig<kWarpgroups, true, kPaired>::kThreads, 1)
    ChunkFwdScanKernel(const __grid_constant__ CUtensorMap v_map,
                       const __grid_constant__ CUtensorMap o_map,
                       const __grid_constant__ FwdParams p, const __grid_constant__ Workspace ws,
                       const __grid_constant__ Slice slice) {
  using C = ScanConfig<kWarpgroups, true, kPaired>;
  extern __shared__ __align__(1024) uint8_t shared[];
  const uint32_t smem = SharedAddress(shared);
  const int tid = threadIdx.x, warpgroup = tid >> 7;
  const int HV = static_cast<int>(p.HV), h = blockIdx.x % HV;
  const int first_half = kWarpgroups == 1 ? blockIdx.y : 0;  // of a pair, the rank
  GriddepcontrolLaunchDependents();  // the next slice is prepared on the SMs that are left
  Segment s = FindWork(p, ws, blockIdx.x / HV);
  if (p.slice_chunks > 0) CutToSlice(s, slice);
  InitRings<C>(smem);
  __syncthreads();
  if constexpr (kPaired) ClusterSync();  // before the peer's loads, and arrivals at its barriers
  if (warpgroup < kWarpgroups) {
    StateRegisters<C>();
    const int v_half = first_half + warpgroup;
    FillOutput(p, s.before, s.token, h, v_half, s.malformed, tid & 127);
    FillOutput(p, s.token + s.length, s.after, h, v_half, s.malformed, tid & 127);
    if (ws.segments > 0 || !s.first) GriddepcontrolWait();  // for states before its own
    ScanChunks<Operand, C>(smem, p, ws, s, h, v_half, warpgroup, /*transition=*/false);
  } else {
    LoaderRegisters<C>();
    if (tid == kWarpgroups * 128) {
      // For images; all else that it reads was there before prepare. Segments are scanned behind
      // combine, which lets them start when prepare has ended.
      if (ws.segments == 0) GriddepcontrolWait();
      LoadChunks<C>(smem, &v_map, p, ws, s, h, first_half, /*with_values=*/true);
    }
    // The first thread of its second warp, and of the third: a state warpgroup's each.
    const int storing = (tid >> 5 & 3) - 1;
    if (storing >= 0 && storing < kWarpgroups && (tid & 31) == 0) {
      StoreOutputs<C>(smem, &o_map, s, h, first_half + storing, storing);
    }
  }
}

// What a segment does to a state, but the last of its sequence.
template <typename Operand>
__global__ void __launch_bounds__(ScanConfig<2, false>::kThreads, 1)
    ChunkFwdSummariseKernel(const __grid_constant__ CUtensorMap v_map,
                            const __grid_constant__ FwdParams p,
                            const __grid_constant__ Workspace ws) {
  using C = ScanConfig<2, false>;
  extern __shared__ __align__(1024) uint8_t shared[];
  const uint32_t smem = SharedAddress(shared);
  const int tid = threadIdx.x, warpgroup = tid >> 7;
  const int HV = static_cast<int>(p.HV), h = blockIdx.x % HV;
  const bool transition = blockIdx.y == 1;
  GriddepcontrolLaunchDependents();
  Segment s = FindWork(p, ws, blockIdx.x / HV);
  // Every block waits: that this kernel has ended has to mean that prepare has.
  if (tid == 2 * 128) GriddepcontrolWait();
  if (s.last || s.length == 0) return;
  if (transition && s.first) s.length = 0;  // the initial state as it is
  InitRings<C>(smem);
  __syncthreads();
  if (warpgroup < 2) {
    StateRegisters<C>();
    ScanChunks<Operand, C>(smem, p, ws, s, h, warpgroup, warpgroup, transition);
  } else {
    LoaderRegisters<C>();
    if (tid == 2 * 128) LoadChunks<C>(smem, &v_map, p, ws, s, h, 0, !transition);
  }
}

}  // namespace jax_kda::sm90
