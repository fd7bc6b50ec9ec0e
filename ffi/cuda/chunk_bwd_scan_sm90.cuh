// The two scans of the gradient, in the forward scan's schedule: one block runs one sequence and
// value head, chunk by chunk, a warpgroup 64 rows of V. N and F are the matrices of prepare without
// their diagonals, so that a product with the diagonal is the fp32 accumulator itself.
//
//   states, first chunk to last          reverse, last chunk to first
//     keeps S                              keeps dS
//     r  = v - k_decayed S                 x  = Aqk^T do + k_restored dS
//     e  = r + N r                         y  = x + F^T x
//     S <- diag(exp(G_last)) S             dS <- diag(exp(G_last)) dS + q_decayed^T do
//          + k_restored^T diag(beta) e           - k_decayed^T diag(beta) y
//     keeps e and e_low                    keeps y; dv = diag(beta) y
//
// All matrices are held transposed, S and dS in fp32 accumulators from end to end. The reverse scan
// divides everything by the scale, which then is no operand's business.
//
// fp16 operands (l2norm) need values in range. Both scans are linear, in (v, S) and in (do, dS), so
// the forward's power of two serves: with |k| <= 1 and 0 <= beta <= 2 a token's factor
// (I - beta k k^T) never lengthens a row of dS, and do adds at most its own size a token; x and y
// are no longer than that, dv at most twice.
//
// Segments run the same way from the state before or after them. What one does to a state, S T + C
// and dS T^T + C', comes from the same loops with nothing kept: C and C' from zeros, T from the
// rows of the identity with v = 0.
//
// Grid: x = (scan order or segment, value head); y = V half when kWarpgroups is 1; z = 0 reverse, 1
// states, of summaries also 2 transitions. The reverse scan is the longer one and starts first.
#pragma once

#include <type_traits>

#include "chunk_bwd_sm90.cuh"
#include "chunk_fwd_scan_sm90.cuh"

namespace jax_kda::sm90 {

template <int kWarpgroups_>
struct BwdScanConfig {
  static constexpr int kWarpgroups = kWarpgroups_;  // 2: all of V; 1: half of it
  static constexpr int kThreads = (kWarpgroups + 1) * 128;
  static constexpr int kImageStages = 2, kValueStages = 3;

  // Shared memory, bytes. An image: q_decayed (reverse), k_decayed, k_restored; F and Aqk, or N;
  // the decay, then beta.
  static constexpr int kOperands = 0, kMatrices = 3 * kTile, kImageBytes = kMatrices + 2 * kMatrix;
  static constexpr int kSmall = image::kDecayBytes + gradient_image::kBetaBytes;
  // A value tile, v or do, is overwritten by e or dv of its chunk.
  static constexpr int kValues = kImageStages * kImageBytes;
  static constexpr int kStates = kValues + kValueStages * kTile;  // S or dS on its way out
  static constexpr int kSecond = kStates + record::kStateTile;    // y or e_low on its way out
  static constexpr int kSmalls = kSecond + kTile;
  static constexpr int kBarriers = kSmalls + kImageStages * 1024;
  // full: the copy engine -> state warps; empty: state warps -> the loading thread
  static constexpr int kImagesFull = kBarriers, kImagesEmpty = kImagesFull + 8 * kImageStages,
                       kValuesFull = kImagesEmpty + 8 * kImageStages,
                       kValuesEmpty = kValuesFull + 8 * kValueStages;
  static constexpr int kBytes = kValuesEmpty + 8 * kValueStages;
  static_assert(kSmall <= 1024 && image::kDecayBytes % 16 == 0);
  static_assert(kBytes <= 232448, "shared memory a block may ask for on sm_90");
};

// The chunk that a scan takes in its i-th step.
template <bool kReverse>
__device__ __forceinline__ int ChunkOfStep(int i, int NT) {
  return kReverse ? NT - 1 - i : i;
}

template <bool kReverse, typename Config>
__device__ void LoadSteps(uint32_t smem, const CUtensorMap* value_map, const Workspace& ws,
                          const Segment& s, int HV, int h, int first_half,
                          bool with_values = true) {
  using C = Config;
  constexpr int kOperandBytes = kReverse ? 3 * kTile : 2 * kTile;  // q_decayed comes first
  constexpr int kMatrixBytes = kReverse ? 2 * kMatrix : kMatrix;
  Ring<C::kImageStages> images;
  Ring<C::kValueStages> values;
  const int NT = (s.length + kChunk - 1) / kChunk;
  // Images are all that the scan has from prepare; what else it reads was there before prepare.
  GriddepcontrolWait();
  for (int i = 0; i < NT; ++i) {
    const int c = ChunkOfStep<kReverse>(i, NT);
    const std::byte* image =
        ws.images + ((s.first_chunk + c) * HV + h) * int64_t{gradient_image::kBytes};
    {
      const uint32_t full = smem + C::kImagesFull + 8 * images.stage;
      const uint32_t to = smem + images.stage * C::kImageBytes;
      const uint32_t small = smem + C::kSmalls + images.stage * 1024;
      if (i >= C::kImageStages) {
        MbarrierWait(smem + C::kImagesEmpty + 8 * images.stage, images.parity ^ 1);
      }
      MbarrierExpectTx(full, kOperandBytes + kMatrixBytes + C::kSmall);
      constexpr int kFirst = 3 * kTile - kOperandBytes;
      BulkLoad(to + C::kOperands + kFirst, image + kFirst, kOperandBytes, full);
      BulkLoad(to + C::kMatrices,
               image + (kReverse ? gradient_image::kYInv : gradient_image::kEInv), kMatrixBytes,
               full);
      BulkLoad(small, image + gradient_image::kDecay, image::kDecayBytes, full);
      BulkLoad(small + image::kDecayBytes, image + gradient_image::kBeta,
               gradient_image::kBetaBytes, full);
      images.Advance();
    }
    if (with_values) {
      const uint32_t full = smem + C::kValuesFull + 8 * values.stage;
      if (i >= C::kValueStages) {
        MbarrierWait(smem + C::kValuesEmpty + 8 * values.stage, values.parity ^ 1);
      }
      MbarrierExpectTx(full, C::kWarpgroups * kHalfTile);
      TmaLoad(smem + C::kValues + values.stage * kTile, value_map, full, h, s.token + c * kChunk,
              first_half);
      values.Advance();
    }
  }
}

// S or dS as left operand -> its tile on the way out, times `factor`.
template <typename Operand>
__device__ __forceinline__ void StageState(const uint32_t (&a)[32], float factor, uint32_t staged,
                                           int lane) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    uint32_t x[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      float2 pair = {Bf16Lo(a[4 * i + j]), Bf16Hi(a[4 * i + j])};
      if (std::is_same_v<Operand, Fp16>) {
        pair = __half22float2(*reinterpret_cast<const __half2*>(&a[4 * i + j]));
      }
      x[j] = Pack<Bf16>(pair.x * factor, pair.y * factor);
    }
    const uint32_t row = (lane & 7) + (lane >> 3 & 1) * 8;
    Stmatrix(staged + (i >> 2) * record::kStateHalf + Swizzled(row, (i & 3) * 2 + (lane >> 4)),
             x[0], x[1], x[2], x[3]);
  }
}

// A transposed accumulator [V, tokens] -> its half of a tile [tokens, V], times `factor` and, by
// token, `by_token`. kLow: not that, but what rounding takes from it.
template <bool kLow = false>
__device__ __forceinline__ void StageValues(const float (&x)[32], float factor,
                                            const float2 (&by_token)[8], uint32_t staged) {
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    uint32_t o[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 f = by_token[2 * j + (i >> 1)];
      const float2 pair = {x[8 * j + 2 * i] * (factor * f.x),
                           x[8 * j + 2 * i + 1] * (factor * f.y)};
      o[i] = Pack<Bf16>(pair.x, pair.y);
      if (kLow) o[i] = Pack<Bf16>(pair.x - Bf16Lo(o[i]), pair.y - Bf16Hi(o[i]));
    }
    StmatrixTrans(staged + j * 16 * 128, o[0], o[1], o[2], o[3]);
  }
}

// v^T or do^T as the tile has it. Tokens of another sequence, or none, are selected away, since
// they may hold NaN.
__device__ __forceinline__ void LoadValueFragments(uint32_t (&u)[16], uint32_t value,
                                                   uint32_t fragment, int valid, int t) {
#pragma unroll
  for (int j = 0; j < 4; ++j) LdmatrixTrans(&u[4 * j], value + fragment + j * 16 * 128);
  if (valid >= kChunk) return;
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const int column = (i >> 1) * 8 + 2 * t;
    u[i] = column >= valid ? 0u : column + 1 >= valid ? u[i] & 0xffffu : u[i];
  }
}

__device__ __forceinline__ float MaxValue(const uint32_t (&u)[16]) {
  uint32_t m = 0;
#pragma unroll
  for (int i = 0; i < 16; ++i) m = MaxBf16X2(m, u[i] & 0x7fff7fffu);
  return StateScale::WarpMax(fmaxf(Bf16Lo(m), Bf16Hi(m)));
}

// S^T, rows of T, -> T and T^T in fp32.
__device__ inline void StoreTransition(const float (&S)[64], float up, float* T, float* transposed,
                                       int row, int column) {
  StoreState(S, up, T, DType::kF32, kHead, row * kHead + column);
#pragma unroll
  for (int i = 0; i < 64; ++i) {
    transposed[(column + (i >> 2) * 8 + (i & 1)) * kHead + row + (i >> 1 & 1) * 8] = S[i] * up;
  }
}

// The warpgroup of 64 V columns. `p`: the forward's parameters, or for the reverse scan those of
// the call that it is: v is do, o is dv, initial_state is dfinal_state. `transition`: the columns
// are rows of the identity, and no value is written.
template <bool kReverse, bool kSummary, typename Operand, typename Config>
__device__ void ScanSteps(uint32_t smem, const CUtensorMap* dv_map, const FwdParams& p,
                          const BwdWorkspace& ws, const Segment& s, int h, int v_half,
                          int warpgroup, bool transition = false) {
  using C = Config;
  constexpr bool kScaled = std::is_same_v<Operand, Fp16>;
  const int thread = threadIdx.x & 127, warp = thread >> 5, lane = thread & 31, g = lane >> 2,
            t = lane & 3;
  auto state_at = [&](int64_t slot) {
    return slot < 0 ? -1
                    : ((slot * p.HV + h) * kHead + v_half * 64 + warp * 16 + g) * kHead + 2 * t;
  };
  const int NT = (s.length + kChunk - 1) / kChunk;
  // What dS is divided by. A sequence without tokens hands dS through as it is.
  const float unit = !kReverse || p.scale == 0.f || NT == 0 ? 1.f : p.scale;
  const int row = v_half * 64 + warp * 16 + g;
  const int64_t states_of = ws.fwd.segments * p.HV * (kState / 4);  // of one of the two scans
  float* const segments = ws.fwd.segment_states + (kReverse ? states_of : 0);
  auto segment_at = [&](int64_t number) { return (number * p.HV + h) * (kState / 4); };
  float S[64];
  if (kReverse ? s.last : s.first) {
    LoadState(S, p.initial_state, p.state_dtype, kHead, state_at(s.slots.read));
  } else if (kSummary && transition) {
    SetIdentity(S, row, 2 * t);
  } else {
    const int64_t before = segment_at(s.number + (kReverse ? 1 : -1));
    LoadState(S, segments, DType::kF32, kHead,
              kSummary || NT == 0 ? -1 : before + row * kHead + 2 * t);
  }
  if (kReverse && unit != 1.f) {
#pragma unroll
    for (int i = 0; i < 64; ++i) S[i] /= unit;
  }
  StateScale scale;
  if (kScaled) scale.Rescale(S, scale.StateBound(S));

  const uint32_t fragment = ValueFragment(warp, lane);
  const int tile_half = (C::kWarpgroups == 1 ? 0 : v_half) * kHalfTile;
  const uint32_t states = smem + C::kStates + v_half * 64 * 128;  // this warpgroup's rows
  const uint32_t second = smem + C::kSecond + v_half * kHalfTile;
  Ring<C::kImageStages> images;
  Ring<C::kValueStages> values;
  int stored_stage = -1;  // value tile whose successor is on its way out
  for (int i = 0; i < NT; ++i) {
    const int c = ChunkOfStep<kReverse>(i, NT);
    const int token = s.token + c * kChunk, valid = s.length - c * kChunk;
    const uint32_t image = smem + images.stage * C::kImageBytes, matrix = image + C::kMatrices;
    const uint32_t value = smem + C::kValues + values.stage * kTile + tile_half;
    const uint32_t small = smem + C::kSmalls + images.stage * 1024;

    uint32_t u[16];  // v^T, then r, then diag(beta) e; or do^T, then x, then -diag(beta) y
    if (!kSummary || !transition) {
      MbarrierWait(smem + C::kValuesFull + 8 * values.stage, values.parity);
      LoadValueFragments(u, value, fragment, valid, t);
      if (kSummary) MbarrierArrive(smem + C::kValuesEmpty + 8 * values.stage);
    } else {
#pragma unroll
      for (uint32_t& pair : u) pair = 0;
    }
    float growth = 0.f;
    if (kScaled) {
      growth = MaxValue(u) * (kReverse ? 64.f : p.beta_mode == BetaMode::kSigmoid ? 8.f : 128.f);
    }
    MbarrierWait(smem + C::kImagesFull + 8 * images.stage, images.parity);
    uint32_t a[32];
    PackState<Operand>(a, S, scale, growth, small, t);
    if (kReverse) {
      const float down = p.scale == 0.f ? 0.f : scale.down;
#pragma unroll
      for (int j = 0; j < 16; ++j) u[j] = Pack<Operand>(Bf16Lo(u[j]) * down, Bf16Hi(u[j]) * down);
    }

    float R[32];                                                     // r, then e; or x, then y
    const uint32_t multiplied = image + (kReverse ? 2 : 1) * kTile;  // k_restored, k_decayed
    const uint64_t by_state = WgmmaDescriptor(multiplied, 16);
    // Transposed operands: a step of 16 rows is 16 * 128 bytes on.
    constexpr uint64_t kRowStep = 16 * 128 >> 4;
    const uint64_t Aqk = WgmmaDescriptor(matrix + kMatrix, 16);
    const uint64_t q_decayed = WgmmaDescriptor(image, kHalfTile);
    WgmmaFence();
    if (kReverse) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        Wgmma64x64<Operand, 1>(R, &u[4 * j], Aqk + j * kRowStep, j > 0);
      }
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const uint64_t step = (j >> 2) * (kHalfTile >> 4) + (j & 3) * 2;
      Wgmma64x64<Operand>(R, &a[4 * j], by_state + step, kReverse || j > 0);
    }
    WgmmaCommit();
    if (kReverse) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        Wgmma64x128Trans<Operand>(S, &u[4 * j], q_decayed + j * kRowStep);
      }
      WgmmaCommit();
    }
    if (!kSummary) {
      if (thread == 0) {
        BulkWaitRead();  // the last chunk's tiles have left
        if (stored_stage >= 0) MbarrierArrive(smem + C::kValuesEmpty + 8 * stored_stage);
      }
      stored_stage = values.stage;
      BarSync(1 + warpgroup, 128);
      StageState<Operand>(a, scale.up * unit, states + warp * 16 * 128, lane);
    }

    float2 beta[8];
#pragma unroll
    for (int j = 0; j < 8; ++j)
      beta[j] = LdsF32x2(small + image::kDecayBytes + (8 * j + 2 * t) * 4);
    uint32_t w[16];
    if (kReverse) {
      WgmmaWait<1>();
#pragma unroll
      for (int j = 0; j < 16; ++j) w[j] = Pack<Operand>(R[2 * j], R[2 * j + 1]);
    } else {
      WgmmaWait<0>();
#pragma unroll
      for (int j = 0; j < 16; ++j) {
        R[2 * j] = fmaf(Bf16Lo(u[j]), scale.down, -R[2 * j]);
        R[2 * j + 1] = fmaf(Bf16Hi(u[j]), scale.down, -R[2 * j + 1]);
        w[j] = Pack<Operand>(R[2 * j], R[2 * j + 1]);
      }
    }
    const uint64_t inverse = WgmmaDescriptor(matrix, 16);
    WgmmaFence();
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      Wgmma64x64<Operand, kReverse>(R, &w[4 * j], inverse + j * (kReverse ? kRowStep : 2), 1);
    }
    WgmmaCommit();
    WgmmaWait<0>();
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      const float2 b = beta[j >> 1];
      w[j] =
          Pack<Operand>(R[2 * j] * (kReverse ? -b.x : b.x), R[2 * j + 1] * (kReverse ? -b.y : b.y));
    }
    const uint64_t to_state = WgmmaDescriptor(image + (kReverse ? 1 : 2) * kTile, kHalfTile);
    WgmmaFence();
#pragma unroll
    for (int j = 0; j < 4; ++j) Wgmma64x128Trans<Operand>(S, &w[4 * j], to_state + j * kRowStep);
    WgmmaCommit();

    if constexpr (!kSummary) {
      // e, or dv, takes the place of the values, which the whole warp has read.
      __syncwarp();
      {
        const float factor = scale.up * unit;
        const float2 ones[8] = {{1.f, 1.f}, {1.f, 1.f}, {1.f, 1.f}, {1.f, 1.f},
                                {1.f, 1.f}, {1.f, 1.f}, {1.f, 1.f}, {1.f, 1.f}};
        if (kReverse) {
          StageValues(R, factor, ones, second + fragment);
          StageValues(R, factor, beta, value + fragment);
        } else {
          StageValues(R, factor, ones, value + fragment);
          StageValues<true>(R, factor, ones, second + fragment);
        }
      }
      BarSync(1 + warpgroup, 128);
      std::byte* record = ws.records + ((s.first_chunk + c) * p.HV + h) * int64_t{record::kBytes};
      if (thread == 0) {
        FenceProxyAsync();  // for all that the barrier was for
        std::byte* state =
            record + (kReverse ? record::kDState : record::kState) + v_half * 64 * 128;
        BulkStore(state, states, 64 * 128);
        BulkStore(state + record::kStateHalf, states + record::kStateHalf, 64 * 128);
        if (kReverse) {
          BulkStore(record + record::kY + v_half * kHalfTile, second, kHalfTile);
          if (valid >= kChunk) TmaStore(dv_map, value, h, token, v_half);
        } else {
          BulkStore(record + record::kE + v_half * kHalfTile, value, kHalfTile);
          BulkStore(record + record::kELow + v_half * kHalfTile, second, kHalfTile);
        }
        BulkCommit();
      }
      if (kReverse && valid < kChunk) {  // the rows after `valid` are not ours to write
        for (int row = thread >> 3; row < valid; row += 16) {
          __nv_bfloat16* dv = static_cast<__nv_bfloat16*>(p.o) +
                              (int64_t{token + row} * p.HV + h) * kHead + v_half * 64;
          *reinterpret_cast<uint4*>(dv + (thread & 7) * 8) =
              Lds128(value + Swizzled(row, thread & 7));
        }
        BarSync(1 + warpgroup, 128);  // before the tile is loaded again
      }
    }
    WgmmaWait<0>();
    __syncwarp();
    MbarrierArrive(smem + C::kImagesEmpty + 8 * images.stage);
    images.Advance();
    values.Advance();
  }
  if constexpr (kSummary) {
    const int64_t at = segment_at(s.number);
    if (transition) {
      StoreTransition(S, scale.up, ws.fwd.transitions + at, ws.fwd.transitions + states_of + at,
                      row, 2 * t);
    } else {
      StoreState(S, scale.up * unit, segments, DType::kF32, kHead, at + row * kHead + 2 * t);
    }
    return;
  }
  if ((kReverse ? s.first : s.last) && s.slots.write >= 0) {
    if (s.malformed) {
#pragma unroll
      for (int i = 0; i < 64; ++i) S[i] = NAN;
    }
    StoreState(S, scale.up * unit, p.final_state, p.state_dtype, kHead, state_at(s.slots.write));
  }
  if (thread == 0) BulkWait();
}

// All gradients of tokens [first, last) but dv, which are no sequence's: zeros, or NaN.
__device__ inline void FillGradients(const BwdParams& b, int first, int last, int h, bool nan,
                                     int thread) {
  const FwdParams& p = b.fwd;
  const uint32_t pair = nan ? 0x7fc07fc0u : 0u;  // NaN in fp32 as well
  const uint4 pairs = {pair, pair, pair, pair};
  const int group = static_cast<int>(p.HV / p.H), piece = thread & 15;
  for (int token = first + (thread >> 4); token < last; token += 8) {
    const int64_t at = int64_t{token} * p.HV + h;
    if (h % group == 0) {
      const int64_t row = (int64_t{token} * p.H + h / group) * 16 + piece;
      static_cast<uint4*>(b.dq)[row] = pairs;
      static_cast<uint4*>(b.dk)[row] = pairs;
    }
    if (p.g_dtype == DType::kF32) {
      static_cast<uint4*>(b.dg)[at * 32 + piece] = pairs;
      static_cast<uint4*>(b.dg)[at * 32 + 16 + piece] = pairs;
    } else {
      static_cast<uint4*>(b.dg)[at * 16 + piece] = pairs;
    }
    if (piece == 0 && p.beta_dtype == DType::kF32) static_cast<uint32_t*>(b.dbeta)[at] = pair;
    if (piece == 0 && p.beta_dtype == DType::kBF16) {
      static_cast<uint16_t*>(b.dbeta)[at] = static_cast<uint16_t>(pair);
    }
  }
}

// Rings' barriers, by one thread. Of summaries every thread releases a value tile, else one whose
// warpgroup has put another in its place.
template <typename Config, bool kSummary>
__device__ void InitBwdBarriers(uint32_t smem) {
  using C = Config;
  for (int i = 0; i < C::kImageStages; ++i) {
    MbarrierInit(smem + C::kImagesFull + 8 * i, 1);
    MbarrierInit(smem + C::kImagesEmpty + 8 * i, 128 * C::kWarpgroups);
  }
  for (int i = 0; i < C::kValueStages; ++i) {
    MbarrierInit(smem + C::kValuesFull + 8 * i, 1);
    MbarrierInit(smem + C::kValuesEmpty + 8 * i, C::kWarpgroups * (kSummary ? 128 : 1));
  }
  FenceMbarrierInit();
}

template <typename Operand, int kWarpgroups>
__global__ void __launch_bounds__(BwdScanConfig<kWarpgroups>::kThreads, 1)
    ChunkBwdScanKernel(const __grid_constant__ CUtensorMap v_map,
                       const __grid_constant__ CUtensorMap do_map,
                       const __grid_constant__ CUtensorMap dv_map,
                       const __grid_constant__ BwdParams b,
                       const __grid_constant__ FwdParams reverse,
                       const __grid_constant__ BwdWorkspace ws) {
  using C = BwdScanConfig<kWarpgroups>;
  extern __shared__ __align__(1024) uint8_t shared[];
  const uint32_t smem = SharedAddress(shared);
  const int tid = threadIdx.x, warpgroup = tid >> 7;
  const bool reversed = blockIdx.z == 0;
  const int HV = static_cast<int>(b.fwd.HV), h = blockIdx.x % HV;
  const int first_half = kWarpgroups == 1 ? blockIdx.y : 0;
  const Segment s = FindWork(reversed ? reverse : b.fwd, ws.fwd, blockIdx.x / HV);
  if (tid == 0) InitBwdBarriers<C, false>(smem);
  __syncthreads();
  // Registers as in the forward's scan.
  if (warpgroup < kWarpgroups) {
    if constexpr (kWarpgroups == 2) SetMaxNRegInc<232>();
    const int v_half = first_half + warpgroup;
    if (reversed) {
      const int thread = tid & 127, end = s.token + s.length;
      FillOutput(reverse, s.before, s.token, h, v_half, s.malformed, thread);
      FillOutput(reverse, end, s.after, h, v_half, s.malformed, thread);
      if (v_half == 0) {
        FillGradients(b, s.before, s.token, h, s.malformed, thread);
        FillGradients(b, end, s.after, h, s.malformed, thread);
      }
      if (ws.fwd.segments > 0) GriddepcontrolWait();  // for the states of segments
      ScanSteps<true, false, Operand, C>(smem, &dv_map, reverse, ws, s, h, v_half, warpgroup);
    } else {
      if (ws.fwd.segments > 0) GriddepcontrolWait();
      ScanSteps<false, false, Operand, C>(smem, nullptr, b.fwd, ws, s, h, v_half, warpgroup);
    }
  } else {
    if constexpr (kWarpgroups == 2) SetMaxNRegDec<40>();
    if (tid == kWarpgroups * 128 && reversed) {
      LoadSteps<true, C>(smem, &do_map, ws.fwd, s, HV, h, first_half);
    } else if (tid == kWarpgroups * 128) {
      LoadSteps<false, C>(smem, &v_map, ws.fwd, s, HV, h, first_half);
    }
  }
}

// What a segment does to S, but the last of its sequence, and to dS, but the first; and the
// transition, which both share, of those that are neither.
template <typename Operand>
__global__ void __launch_bounds__(BwdScanConfig<2>::kThreads, 1)
    ChunkBwdSummariseKernel(const __grid_constant__ CUtensorMap v_map,
                            const __grid_constant__ CUtensorMap do_map,
                            const __grid_constant__ BwdParams b,
                            const __grid_constant__ FwdParams reverse,
                            const __grid_constant__ BwdWorkspace ws) {
  using C = BwdScanConfig<2>;
  extern __shared__ __align__(1024) uint8_t shared[];
  const uint32_t smem = SharedAddress(shared);
  const int tid = threadIdx.x, warpgroup = tid >> 7;
  const int HV = static_cast<int>(b.fwd.HV), h = blockIdx.x % HV;
  const bool reversed = blockIdx.z == 0, transition = blockIdx.z == 2;
  const Segment s = FindWork(reversed ? reverse : b.fwd, ws.fwd, blockIdx.x / HV);
  // Every block waits: that this kernel has ended has to mean that prepare has.
  if (tid == 2 * 128) GriddepcontrolWait();
  if (s.length == 0 || (reversed || transition ? s.first : s.last) || (transition && s.last))
    return;
  if (tid == 0) InitBwdBarriers<C, true>(smem);
  __syncthreads();
  if (warpgroup < 2) {
    SetMaxNRegInc<232>();
    if (reversed) {
      ScanSteps<true, true, Operand, C>(smem, nullptr, reverse, ws, s, h, warpgroup, warpgroup);
    } else {
      ScanSteps<false, true, Operand, C>(smem, nullptr, b.fwd, ws, s, h, warpgroup, warpgroup,
                                         transition);
    }
  } else {
    SetMaxNRegDec<40>();
    if (tid == 2 * 128 && reversed) {
      LoadSteps<true, C>(smem, &do_map, ws.fwd, s, HV, h, 0);
    } else if (tid == 2 * 128) {
      LoadSteps<false, C>(smem, &v_map, ws.fwd, s, HV, h, 0, !transition);
    }
  }
}

}  // namespace jax_kda::sm90
