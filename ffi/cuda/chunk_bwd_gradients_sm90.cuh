// Gradients: q, k, g, beta, do of one chunk and query/key head with the records of the scans ->
// dq, dk, dg, dbeta, and what the chunk adds to dA_log and ddt_bias.
//
//   dAqk = scale tril(do v_new^T)      dAkk = -tril(dv v_new^T, -1)      dbeta = diagonal(y e^T)
//   row_q = scale do S                 row_k = -dv S                     col = v_new dS
//
// with e + e_low for e.
//
// The pairs of tokens are the business of chunk_bwd_pairs_sm90.cuh; what a thread holds, and what
// is where in shared memory, of chunk_bwd_place_sm90.cuh.
//
// Grid: persistent, one block an SM. Block: 16 warps, 8 of each side. Five barriers a chunk: its
// products are done; dAqk, dAkk and norms are there; of a pair of warps, their operands are; pairs
// are done; dq, dk and dg are there. Of the next chunk, k, g, S and dS are loaded from the second
// on, the rest of the record from the fourth, q from the last.
#pragma once

#include <type_traits>

#include "chunk_bwd_pairs_sm90.cuh"

namespace jax_kda::sm90 {

struct GradientMaps {
  CUtensorMap q, k, do_, g, dq, dk, dg;  // g and dg where g is bf16
};

// What a block does next: one chunk, one query/key head and one of its value heads. 32 bits hold
// all items, whose images are 72 KB each.
inline constexpr uint32_t kNoItem = ~0u;
struct GradientStep {
  uint32_t item;  // (chunk slot, query/key head)
  uint32_t r;     // which value head of the group
  ChunkSlot chunk;
  uint32_t slot, hq, h;

  __device__ bool Last(const FwdParams& p) const {
    return (r + 1) * static_cast<uint32_t>(p.H) == static_cast<uint32_t>(p.HV);
  }
};

__device__ __forceinline__ uint32_t GradientItems(const FwdParams& p, const Workspace& ws) {
  return static_cast<uint32_t>(ws.NT) * static_cast<uint32_t>(p.H);
}
__device__ inline GradientStep FindGradientStep(const FwdParams& p, const Workspace& ws,
                                                uint32_t item, uint32_t r) {
  GradientStep s{item, r, {}, 0, 0, 0};
  const uint32_t H = static_cast<uint32_t>(p.H), group = static_cast<uint32_t>(p.HV) / H;
  for (; s.item < GradientItems(p, ws); s.item += gridDim.x) {
    s.slot = s.item / H;
    s.hq = s.item - s.slot * H;
    s.h = s.hq * group + r;
    s.chunk = FindChunk(p, ws, s.slot);
    if (s.chunk.valid > 0) return s;
  }
  s.item = kNoItem;
  return s;
}
__device__ inline GradientStep NextGradientStep(const FwdParams& p, const Workspace& ws,
                                                const GradientStep& s) {
  return s.Last(p) ? FindGradientStep(p, ws, s.item + gridDim.x, 0)
                   : FindGradientStep(p, ws, s.item, s.r + 1);
}

// One thread each: what the products of a step take of its record, and beta; S and dS; k and g; q.
__device__ inline void LoadValues(uint32_t smem, const GradientMaps& maps, const FwdParams& p,
                                  const BwdWorkspace& ws, const GradientStep& s) {
  using C = GradientsConfig;
  const int64_t at = int64_t{s.slot} * p.HV + s.h;
  const std::byte* image = ws.fwd.images + at * gradient_image::kBytes;
  const std::byte* record = ws.records + at * record::kBytes;
  const uint32_t full = smem + C::kValuesFull;
  MbarrierExpectTx(full, 4 * kTile + kHead * 4 + kChunk * 4);
  BulkLoad(smem + C::kE, record + record::kE, 2 * kTile, full);
  BulkLoad(smem + C::kELow, record + record::kELow, kTile, full);
  TmaLoad(smem + C::kDo, &maps.do_, full, s.h, s.chunk.token, 0);
  BulkLoad(smem + C::kBeta, image + gradient_image::kBeta, kChunk * 4, full);
  BulkLoad(smem + C::kDecay, image + gradient_image::kDecay, kHead * 4, full);
}
__device__ inline void LoadStates(uint32_t smem, const FwdParams& p, const BwdWorkspace& ws,
                                  const GradientStep& s) {
  using C = GradientsConfig;
  const int64_t at = int64_t{s.slot} * p.HV + s.h;
  MbarrierExpectTx(smem + C::kStatesFull, 2 * record::kStateTile);
  BulkLoad(smem + C::kState, ws.records + at * record::kBytes + record::kState,
           2 * record::kStateTile, smem + C::kStatesFull);
}
template <typename G>
__device__ inline void LoadInputs(uint32_t in, uint32_t full, const GradientMaps& maps,
                                  const FwdParams& p, const GradientStep& s) {
  using C = GradientsConfig;
  const bool wide = sizeof(G) == 4;
  MbarrierExpectTx(full, kTile + (wide ? s.chunk.valid * kHead * 4 : kTile));
  TmaLoad(in + C::kK, &maps.k, full, s.hq, s.chunk.token, 0);
  if (wide) {
    const float* row =
        static_cast<const float*>(p.g) + (int64_t{s.chunk.token} * p.HV + s.h) * kHead;
#pragma unroll 1
    for (int t = 0; t < s.chunk.valid; ++t, row += p.HV * kHead) {
      BulkLoad(in + C::kG + t * C::kWideRow, row, kHead * 4, full);
    }
  } else {
    TmaLoad(in + C::kG, &maps.g, full, s.h, s.chunk.token, 0);
  }
}

__device__ inline void LoadQueries(uint32_t in, uint32_t full, const GradientMaps& maps,
                                   const GradientStep& s) {
  MbarrierExpectTx(full, kTile);
  TmaLoad(in + GradientsConfig::kQ, &maps.q, full, s.hq, s.chunk.token, 0);
}

// Issued, not waited for: do S and y S of this warp's channels and tokens.
__device__ __forceinline__ void IssueStateProducts(float (&dq)[4][4], float (&dk)[4][4],
                                                   uint32_t smem) {
  using C = GradientsConfig;
  const int warpgroup = __shfl_sync(~0u, ThreadIndex() >> 7, 0), odd = warpgroup & 1;
  const uint32_t tokens = (warpgroup >> 1) * 32 * 128;
  const uint64_t y = WgmmaDescriptor(smem + C::kY + tokens, 16),
                 do_ = WgmmaDescriptor(smem + C::kDo + tokens, 16),
                 S = WgmmaDescriptor(smem + C::kState + odd * record::kStateHalf, 16);
  constexpr uint64_t kRowStep = 16 * 128 >> 4;
  WgmmaFence();
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const uint64_t step = (j >> 2) * (kHalfTile >> 4) + (j & 3) * 2;
    Wgmma64x32<1>(dq, S + j * kRowStep, do_ + step, j > 0);
    Wgmma64x32<1>(dk, S + j * kRowStep, y + step, j > 0);
  }
  WgmmaCommit();
}
// So are e dS, and a quarter of do e^T (first and third warpgroup) or y e^T: 64 tokens i, 32 tokens
// j. Of e and of e_low.
__device__ __forceinline__ void IssueErrorProducts(float (&dA)[4][4], float (&dG)[4][4],
                                                   uint32_t smem) {
  using C = GradientsConfig;
  const int warpgroup = __shfl_sync(~0u, ThreadIndex() >> 7, 0), odd = warpgroup & 1;
  const uint32_t tokens = (warpgroup >> 1) * 32 * 128;
  const uint64_t left = WgmmaDescriptor(smem + (odd ? C::kY : C::kDo), 16),
                 dS = WgmmaDescriptor(smem + C::kDState + odd * record::kStateHalf, 16);
  constexpr uint64_t kRowStep = 16 * 128 >> 4;
  WgmmaFence();
#pragma unroll
  for (int low = 0; low < 2; ++low) {
    const uint64_t e = WgmmaDescriptor(smem + (low ? C::kELow : C::kE) + tokens, 16);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const uint64_t step = (j >> 2) * (kHalfTile >> 4) + (j & 3) * 2;
      Wgmma64x32<0>(dA, left + step, e + step, low + j > 0);
      Wgmma64x32<1>(dG, dS + j * kRowStep, e + step, low + j > 0);
    }
  }
  WgmmaCommit();
}

// 1 / norm of 16 rows of q or k, `tile`, from `first` on, to `norms`: as in prepare but 0 for rows
// of no sequence alone, since the gradient of a row of zeros is not 0.
__device__ __forceinline__ void GradientNorms(uint32_t tile, uint32_t norms, int first, int valid) {
  const int lane = ThreadIndex() & 31, g = lane >> 2, t = lane & 3;
  const Corners at(lane);
  float low[4] = {}, high[4] = {};
#pragma unroll
  for (int step = 0; step < kHead / 16; ++step) {
    uint32_t x[4];
    Ldmatrix(x, tile + (step >> 2) * kHalfTile +
                    Swizzled(first + at.down_first_row, (step & 3) * 2 + at.down_first_piece));
    Mma<Bf16>(low, x, x[0], x[2]);
    Mma<Bf16>(high, x, x[1], x[3]);
  }
  if (t == g >> 1) {
    const int row = first + g;
    const float upper = Rsqrt((g & 1 ? low[1] : low[0]) + 1e-6f),
                lower = Rsqrt((g & 1 ? high[3] : high[2]) + 1e-6f);
    StsF32(norms + row * 4, row < valid ? upper : 0.f);
    StsF32(norms + row * 4 + 32, row + 8 < valid ? lower : 0.f);
  }
}

// What S with dS adds to dg of every token, from this side's half of V, to the side's sums: a
// diagonal of S^T dS, so that one lane has a channel's.
__device__ __forceinline__ void StateDots(uint32_t smem) {
  using C = GradientsConfig;
  const GradientPlace at(smem);
  const uint32_t own = (at.warp >> 2) * record::kStateHalf + at.Column() + at.side * 64 * 128;
  float low[4] = {}, high[4] = {};
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    uint32_t S[4], dS[4];
    LdmatrixTrans(S, smem + C::kState + own + step * 16 * 128);
    LdmatrixTrans(dS, smem + C::kDState + own + step * 16 * 128);
    Mma<Bf16>(low, S, dS[0], dS[2]);
    Mma<Bf16>(high, S, dS[1], dS[3]);
  }
  if (at.t == at.g >> 1) {
    const uint32_t decay = smem + C::kDecay + at.channel * 4, to = at.SideAt(at.side);
    StsF32(to, (at.g & 1 ? low[1] : low[0]) * LdsF32(decay));
    StsF32(to + 32, (at.g & 1 ? high[3] : high[2]) * LdsF32(decay + 32));
  }
}

// The tokens of the diagonals of dAqk and dAkk that this lane has: its warp's block is on the
// diagonal, and of rows g and g + 8 it has columns g and g + 8.
struct DiagonalPlace {
  int first;  // or -1
  __device__ __forceinline__ explicit DiagonalPlace(int tid) {
    const int I = tid >> 5 & 3, g = tid >> 2 & 7, t = tid & 3;
    first = I >> 1 == tid >> 8 && t == g >> 1 ? I * 16 + g : -1;
  }
};
// The logits of beta at both, which come from far away.
__device__ __forceinline__ void LoadLogits(float (&logits)[2], const FwdParams& p,
                                           const GradientStep& s) {
  const int tid = ThreadIndex();
  logits[0] = logits[1] = 0.f;
  if ((tid >> 7 & 1) == 0 || p.beta_mode == BetaMode::kProbability) return;
  const int first = DiagonalPlace(tid).first;
#pragma unroll
  for (int x = 0; x < 2; ++x) {
    if (first < 0 || first + 8 * x >= s.chunk.valid) continue;
    const int64_t token = int64_t{s.chunk.token + first + 8 * x} * p.HV + s.h;
    logits[x] = p.beta_dtype == DType::kF32
                    ? static_cast<const float*>(p.beta)[token]
                    : __bfloat162float(static_cast<const __nv_bfloat16*>(p.beta)[token]);
  }
}

// dAqk or dAkk from their quarters, 16 rows a warp; the diagonals apart: of dAqk, which no decay is
// between, and of y e^T, which is dbeta.
__device__ __forceinline__ void StorePairs(const float (&dA)[4][4], const float (&logits)[2],
                                           uint32_t smem, const BwdParams& b,
                                           const GradientStep& s) {
  using C = GradientsConfig;
  const FwdParams& p = b.fwd;
  const int tid = ThreadIndex(), lane = tid & 31, g = lane >> 2, t = lane & 3;
  const bool of_q = (tid >> 7 & 1) == 0;
  const int I = tid >> 5 & 3, first_J = (tid >> 8) * 2, valid = s.chunk.valid;
  const int i = I * 16 + g;
  const float scale[2] = {of_q ? p.scale : -LdsF32(smem + C::kBeta + i * 4),
                          of_q ? p.scale : -LdsF32(smem + C::kBeta + i * 4 + 32)};
  const uint32_t matrix = smem + (of_q ? C::kDAqk : C::kDAkk);
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    if (first_J + (n >> 1) > I) break;
    const int j = (first_J * 2 + n) * 8 + 2 * t;
    const float2 beta = LdsF32x2(smem + C::kBeta + j * 4);
#pragma unroll
    for (int x = 0; x < 2; ++x) {
      const int row = i + 8 * x;  // past `valid` do may hold NaN
      const bool low = row < valid && row > j, high = row < valid && row > j + 1;
      Sts32(matrix + Swizzled(row, first_J * 2 + n) + t * 4,
            Pack<Bf16>(low ? scale[x] * beta.x * dA[n][2 * x] : 0.f,
                       high ? scale[x] * beta.y * dA[n][2 * x + 1] : 0.f));
    }
  }
  if (const int first = DiagonalPlace(tid).first; first >= 0) {
#pragma unroll
    for (int x = 0; x < 2; ++x) {
      const int token = first + 8 * x;
      const float even = I & 1 ? dA[2 + x][2 * x] : dA[x][2 * x],
                  odd = I & 1 ? dA[2 + x][2 * x + 1] : dA[x][2 * x + 1];
      float diagonal = g & 1 ? odd : even;
      const float beta = LdsF32(smem + C::kBeta + token * 4);
      if (of_q) {
        StsF32(smem + C::kDiagonal + token * 4, token < valid ? p.scale * beta * diagonal : 0.f);
      } else if (token < valid) {
        const int64_t to = int64_t{s.chunk.token + token} * p.HV + s.h;
        if (p.beta_mode != BetaMode::kProbability) {
          diagonal *= beta * Rcp(1.f + Ex2(kLog2E * logits[x]));
        }
        if (p.beta_dtype == DType::kF32) {
          static_cast<float*>(b.dbeta)[to] = diagonal;
        } else {
          static_cast<__nv_bfloat16*>(b.dbeta)[to] = __float2bfloat16(diagonal);
        }
      }
    }
  }
}

// What dg gets from outside this side: what all tokens get, and dG of later ones on the other side.
// The second tells the first before a barrier, which hears it afterwards.
__device__ __forceinline__ void TellSide(const float (&dG)[4][4], float (&outside)[2],
                                         uint32_t smem) {
  const GradientPlace at(smem);
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    outside[c] = LdsF32(at.SideAt(at.side) + 32 * c);
    if (at.side == 0) continue;
    float total = (dG[0][2 * c] + dG[0][2 * c + 1] + dG[1][2 * c] + dG[1][2 * c + 1]) +
                  (dG[2][2 * c] + dG[2][2 * c + 1] + dG[3][2 * c] + dG[3][2 * c + 1]);
    total += __shfl_xor_sync(~0u, total, 1);
    total += __shfl_xor_sync(~0u, total, 2);
    __syncwarp();  // the others have read it
    if (at.t == 0) StsF32(at.SideAt(1) + 32 * c, total + outside[c]);
  }
}

// dG -> dg -> the gradient of the gate's input, in g's place, and of its parameters.
template <Gate kGate, typename G>
__device__ __forceinline__ void FinishGates(float (&dG)[4][4], float (&outside)[2], uint32_t smem,
                                            uint32_t in, const ChannelGate& gate,
                                            const FwdParams& p, const BwdWorkspace& ws,
                                            const GradientStep& s) {
  using C = GradientsConfig;
  const GradientPlace at(smem);
  const int valid = s.chunk.valid;
  // dG -> dg: the sum over this token and all later ones, and what comes from outside.
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    outside[c] += LdsF32(at.SideAt(at.side ^ 1) + 32 * c);
  }
  const GateParams params = gate.Params<kGate>(p);
  const float A = gate.A();
  float dA_log = 0.f, ddt_bias[2] = {0.f, 0.f};
#pragma unroll
  for (int n = 3; n >= 0; --n) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      float (&d)[4] = dG[n];
      d[2 * c] += d[2 * c + 1];
      const float one = __shfl_xor_sync(~0u, d[2 * c], 1), two = d[2 * c] + one;
      const float other = __shfl_xor_sync(~0u, two, 2);
      const float after = outside[c] + (at.t & 1 ? 0.f : one) + (at.t & 2 ? 0.f : other);
      d[2 * c] += after;
      d[2 * c + 1] += after;
      outside[c] += two + other;
    }
  }
  // By the gate's input. g is read again: its tile is this warp's alone, and dg goes there.
#pragma unroll
  for (int I = 0; I < 2; ++I) {
    uint32_t g_raw[4], packed[4];
    LoadGates<G>(g_raw, in + C::kG + at.own + I * at.kSixteen);
    float x[4][2], dx[4][2];  // by n-tile and channel, as registers of g_raw; of both tokens
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int n = 2 * I + (i >> 1), c = i & 1, token = at.token + 8 * n;
      const float2 pair = GatePairAt<G>(g_raw[i], in + C::kG, token, at.channel + 8 * c);
      x[i][0] = pair.x;
      x[i][1] = pair.y;
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        dx[i][e] = dG[n][2 * c + e];
        if (valid < kChunk && token + e >= valid) x[i][e] = dx[i][e] = 0.f;
      }
    }
    // A gate that lets nothing through has a gradient of exactly 0.
    constexpr float kNothing = -126.f;
    if (kGate == Gate::kActivated) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if (x[i >> 1][i & 1] * kLog2E < kNothing) dx[i >> 1][i & 1] = 0.f;
      }
    } else if (kGate == Gate::kSoftplus) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int c = i >> 1 & 1;
        float& d = dx[i >> 1][i & 1];
        const float y = (x[i >> 1][i & 1] + gate.bias[c]) * params.slope;
        const float log2_a = params.scale * Softplus2(y);
        d = log2_a < kNothing ? 0.f : d;
        dA_log = fmaf(d, log2_a * (1 / kLog2E), dA_log);
        d *= -A * Rcp(1.f + Ex2(-y));
        ddt_bias[c] += d;
      }
    } else {
      const float slope = A * p.lower_bound;
      const bool open = params.scale >= kNothing;  // whatever the input
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int c = i >> 1 & 1;
        float& d = dx[i >> 1][i & 1];
        const float z = x[i >> 1][i & 1] + gate.bias[c];
        const float falling = Ex2(fminf(z * params.slope, 100.f)), rising = Rcp(1.f + falling);
        if (!open && params.scale * rising < kNothing) d = 0.f;
        d *= slope * (rising * rising) * falling;
        dA_log = fmaf(d, z, dA_log);
        ddt_bias[c] += d;
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (sizeof(G) == 4) {
        const int c = i & 1, token = at.token + 8 * (2 * I + (i >> 1));
        const uint32_t wide = in + C::kG + token * C::kWideRow + (at.channel + 8 * c) * 4;
        StsF32(wide, dx[i][0]);
        StsF32(wide + C::kWideRow, dx[i][1]);
      }
      packed[i] = Pack<Bf16>(dx[i][0], dx[i][1]);
    }
    if (sizeof(G) == 2) {
      StmatrixTrans(in + C::kG + at.own + I * at.kSixteen, packed[0], packed[1], packed[2],
                    packed[3]);
    }
  }
  if (kGate != Gate::kActivated) {
    float* sums = ws.parameter_sums + (int64_t{s.slot} * p.HV + s.h) * kParameterSums;
#pragma unroll
    for (int bit = 1; bit < 32; bit *= 2) dA_log += __shfl_xor_sync(~0u, dA_log, bit);
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      ddt_bias[c] += __shfl_xor_sync(~0u, ddt_bias[c], 1);
      ddt_bias[c] += __shfl_xor_sync(~0u, ddt_bias[c], 2);
      if (at.t == 0) sums[at.side * kHead + at.channel + 8 * c] = ddt_bias[c];
    }
    if (at.lane == 0) sums[2 * kHead + at.side * 8 + at.warp] = dA_log;
  }
}

// Value heads of a group are added up in their order, by the thread that has the element.
__device__ __forceinline__ void AddGroup(float (&dq)[4][4], float (&dk)[4][4],
                                         const BwdWorkspace& ws, int tid, bool add, bool last) {
  float* sums = ws.group_sums + int64_t{blockIdx.x} * kGroupSums * kGradientThreads + tid;
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    float* at_q = sums + i * kGradientThreads;
    float* at_k = at_q + 16 * kGradientThreads;
    float& q = dq[i >> 2][i & 3];
    float& k = dk[i >> 2][i & 3];
    if (add) {
      q += *at_q;
      k += *at_k;
    }
    if (!last) {
      *at_q = q;
      *at_k = k;
    }
  }
}

// One step of a sum over lanes: 2 kKeep values become kKeep, the upper ones on lanes with bit
// 2 kKeep.
template <int kKeep>
__device__ __forceinline__ void FoldSums(float (&x)[16], int lane) {
#pragma unroll
  for (int i = 0; i < kKeep; ++i) {
    const float low = x[i], high = x[i + kKeep];
    x[i] = (lane & 2 * kKeep ? high : low) +
           __shfl_xor_sync(~0u, lane & 2 * kKeep ? low : high, 2 * kKeep);
  }
}

// q . dq and k . dk of every token, over this warp's channels; heard after a barrier.
template <typename Type, typename G>
__device__ __forceinline__ void TellDots(const float (&dq)[4][4], const float (&dk)[4][4],
                                         uint32_t smem, uint32_t in) {
  using C = GradientsConfig;
  const GradientPlace at(smem);
  float dots[16];
#pragma unroll
  for (int I = 0; I < 2; ++I) {
    uint32_t q[4], k[4];
    LdmatrixTrans(q, in + C::kQ + at.own + I * at.kSixteen);
    LdmatrixTrans(k, in + C::kK + at.own + I * at.kSixteen);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int n = 2 * I + half;
      const float2 q0 = Unpack<Type>(q[2 * half]), q1 = Unpack<Type>(q[2 * half + 1]);
      const float2 k0 = Unpack<Type>(k[2 * half]), k1 = Unpack<Type>(k[2 * half + 1]);
      dots[2 * n] = fmaf(q0.x, dq[n][0], q1.x * dq[n][2]);
      dots[2 * n + 1] = fmaf(q0.y, dq[n][1], q1.y * dq[n][3]);
      dots[8 + 2 * n] = fmaf(k0.x, dk[n][0], k1.x * dk[n][2]);
      dots[8 + 2 * n + 1] = fmaf(k0.y, dk[n][1], k1.y * dk[n][3]);
    }
  }
  FoldSums<8>(dots, at.lane);
  FoldSums<4>(dots, at.lane);
  FoldSums<2>(dots, at.lane);
  // What is left is of q or k by lane bit 16, of n by the next two, of t by the last.
  StsF32x2(at.DotsAt<G>(in, at.warp), dots[0], dots[1]);
}

// dq and dk of the normalised rows -> of the rows as they are given, in the places of q and k.
template <bool kL2Norm, typename Type, typename G>
__device__ __forceinline__ void FinishKeys(float (&dq)[4][4], float (&dk)[4][4], uint32_t smem,
                                           uint32_t in) {
  using C = GradientsConfig;
  const GradientPlace at(smem);
  float2 sum = {0.f, 0.f};  // of the token and of q or k that this lane told
  if (kL2Norm) {
#pragma unroll
    for (int w = 0; w < 8; ++w) {
      const float2 dots = LdsF32x2(at.DotsAt<G>(in, w));
      sum.x += dots.x;
      sum.y += dots.y;
    }
  }
#pragma unroll
  for (int which = 0; which < 2; ++which) {
    float (&d)[4][4] = which == 0 ? dq : dk;
    const uint32_t tile = in + (which == 0 ? C::kQ : C::kK) + at.own;
#pragma unroll
    for (int I = 0; I < 2; ++I) {
      uint32_t x[4], o[4];
      if (kL2Norm) LdmatrixTrans(x, tile + I * at.kSixteen);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int n = 2 * I + half;
        float2 dot, r;
        if (kL2Norm) {
          dot = {__shfl_sync(~0u, sum.x, which * 16 + n * 4 + at.t),
                 __shfl_sync(~0u, sum.y, which * 16 + n * 4 + at.t)};
          r = LdsF32x2(smem + C::kNorms + (which * kChunk + at.token + 8 * n) * 4);
        }
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const int i = 2 * half + c;
          float2 dx = {d[n][2 * c], d[n][2 * c + 1]};
          if (kL2Norm) {
            const float2 pair = Unpack<Type>(x[i]);
            dx = {r.x * fmaf(-pair.x, dot.x, dx.x), r.y * fmaf(-pair.y, dot.y, dx.y)};
          }
          o[i] = Pack<Bf16>(dx.x, dx.y);
        }
      }
      StmatrixTrans(tile + I * at.kSixteen, o[0], o[1], o[2], o[3]);
    }
  }
}

// Whole chunks leave by the copy engine; of a partial one the rows after `valid` are not ours.
template <typename G>
__device__ __forceinline__ void StoreGradients(uint32_t in, const GradientMaps& maps,
                                               const BwdParams& b, const GradientStep& s) {
  using C = GradientsConfig;
  const FwdParams& p = b.fwd;
  const bool last = s.Last(p);
  const int tid = ThreadIndex(), valid = s.chunk.valid;
  if (valid >= kChunk && tid == 0) {
    if (last) {
      TmaStore(&maps.dq, in + C::kQ, s.hq, s.chunk.token, 0);
      TmaStore(&maps.dk, in + C::kK, s.hq, s.chunk.token, 0);
    }
    if (sizeof(G) == 2) TmaStore(&maps.dg, in + C::kG, s.h, s.chunk.token, 0);
  }
  if (sizeof(G) == 4 && tid == 0) {
    float* row = static_cast<float*>(b.dg) + (int64_t{s.chunk.token} * p.HV + s.h) * kHead;
#pragma unroll 1
    for (int i = 0; i < valid; ++i, row += p.HV * kHead) {
      BulkStore(row, in + C::kG + i * C::kWideRow, kHead * 4);
    }
  }
  if (valid < kChunk) {
    for (int row = tid >> 4; row < valid; row += kGradientThreads / 16) {
      const int piece = tid & 15;
      const uint32_t from = in + (piece >> 3) * kHalfTile + Swizzled(row, piece & 7);
      const int64_t token = s.chunk.token + row;
      if (last) {
        const int64_t to = (token * p.H + s.hq) * 16 + piece;
        static_cast<uint4*>(b.dq)[to] = Lds128(from + C::kQ);
        static_cast<uint4*>(b.dk)[to] = Lds128(from + C::kK);
      }
      if (sizeof(G) == 2) {
        static_cast<uint4*>(b.dg)[(token * p.HV + s.h) * 16 + piece] = Lds128(from + C::kG);
      }
    }
    if (C::kStages<G> == 1) __syncthreads();
  }
}

template <bool kL2Norm, Gate kGate, typename G>
__global__ void __launch_bounds__(kGradientThreads, 1)
    ChunkBwdGradientsKernel(const __grid_constant__ GradientMaps maps,
                            const __grid_constant__ BwdParams b,
                            const __grid_constant__ BwdWorkspace ws) {
  using C = GradientsConfig;
  constexpr int kStages = C::kStages<G>;
  using Type = std::conditional_t<kL2Norm, Fp16, Bf16>;  // of q and k as they are normalised
  extern __shared__ __align__(1024) uint8_t shared[];
  const uint32_t smem = SharedAddress(shared);
  const FwdParams& p = b.fwd;
  // Steps are in shared memory: registers are short.
  static_assert(sizeof(GradientStep) <= 64 && C::kSteps % 8 == 0);
  auto step = [&](uint32_t which) {
    return reinterpret_cast<GradientStep*>(shared + C::kSteps + (which & 1) * 64);
  };
  auto stage_of = [&](uint32_t i) { return kStages == 1 ? 0 : i & 1; };
  auto stage = [&](uint32_t i) { return smem + C::kInputs + stage_of(i) * C::kStageBytes; };
  auto load_inputs = [&](uint32_t i, const GradientStep& s) {
    LoadInputs<G>(stage(i), smem + C::kInputsFull + 8 * stage_of(i), maps, p, s);
  };
  auto load_queries = [&](uint32_t i, const GradientStep& s) {
    LoadQueries(stage(i), smem + C::kQueriesFull, maps, s);
  };
  if (ThreadIndex() == 0) {
    const GradientStep s = FindGradientStep(p, ws.fwd, blockIdx.x, 0);
    *step(0) = s;
    Sts32(smem + C::kZero, 0);
    MbarrierInit(smem + C::kValuesFull, 1);
    MbarrierInit(smem + C::kStatesFull, 1);
    MbarrierInit(smem + C::kQueriesFull, 1);
    for (int i = 0; i < kStages; ++i) MbarrierInit(smem + C::kInputsFull + 8 * i, 1);
    FenceMbarrierInit();
    if (s.item != kNoItem) {
      load_inputs(0, s);
      load_queries(0, s);
    }
    GriddepcontrolWait();  // for the scans' records, which all but the inputs comes after
    if (s.item != kNoItem) {
      LoadValues(smem, maps, p, ws, s);
      LoadStates(smem, p, ws, s);
    }
  }
  __syncthreads();
  for (uint32_t i = 0; step(i)->item != kNoItem; ++i) {
    const GradientStep& s = *step(i);
    const int valid = s.chunk.valid;
    const uint32_t in = stage(i);
    float dq[4][4], dk[4][4], dG[4][4], exponents[4][4];
    MbarrierWait(smem + C::kValuesFull, i & 1);
    MbarrierWait(smem + C::kStatesFull, i & 1);
    {
      const ChannelGate gate(p, s.chunk.row, s.h, GradientPlace(smem).channel);
      float dA[4][4], eights[2], logits[2];
      IssueStateProducts(dq, dk, smem);
      MbarrierWait(smem + C::kInputsFull + 8 * stage_of(i), kStages == 1 ? i & 1 : i >> 1 & 1);
      MiddleExponents<kGate, G>(exponents, eights, smem, in, p, gate, valid);
      LoadLogits(logits, p, s);
      IssueErrorProducts(dA, dG, smem);
      StateDots(smem);
      WgmmaWait<0>();
      __syncthreads();
      StoreEights(eights, smem);
      StorePairs(dA, logits, smem, b, s);
    }
    MbarrierWait(smem + C::kQueriesFull, i & 1);
    // A warp whose quarter of dAqk or dAkk is above the diagonal: norms of 32 rows.
    if (const int tid = ThreadIndex(); kL2Norm && tid >= 256 && (tid & 64) == 0) {
      const bool of_q = (tid & 128) == 0;
      const uint32_t tile = in + (of_q ? C::kQ : C::kK),
                     norms = smem + C::kNorms + (of_q ? 0 : kChunk * 4);
      GradientNorms(tile, norms, tid & 32, valid);
      GradientNorms(tile, norms, (tid & 32) + 16, valid);
    }
    if (kStages == 2 && ThreadIndex() == 0) BulkWaitRead();  // the chunk before has left its stage
    __syncthreads();
    if (ThreadIndex() == 0) {
      const GradientStep next = NextGradientStep(p, ws.fwd, s);
      *step(i + 1) = next;
      if (next.item != kNoItem) {
        LoadStates(smem, p, ws, next);
        if (kStages == 2) load_inputs(i + 1, next);
      }
    }
    if (AnyStrong(smem)) {
      AddPairs<true, kL2Norm, kGate, G>(dq, dk, dG, exponents, smem, in, p, s.chunk.row, s.h,
                                        valid);
    } else {
      AddPairs<false, kL2Norm, kGate, G>(dq, dk, dG, exponents, smem, in, p, s.chunk.row, s.h,
                                         valid);
    }
    const ChannelGate gate(p, s.chunk.row, s.h, GradientPlace(smem).channel);  // comes by then
    float outside[2];
    TellSide(dG, outside, smem);
    if (p.HV > p.H) {
      AddGroup(dq, dk, ws, ThreadIndex(), s.r > 0, s.Last(p));
    }
    if (kL2Norm && s.Last(p)) TellDots<Type, G>(dq, dk, smem, in);
    __syncthreads();
    if (ThreadIndex() == 0) {
      FenceProxyAsync();  // for all that the barrier was for
      const GradientStep& next = *step(i + 1);
      if (next.item != kNoItem) LoadValues(smem, maps, p, ws, next);
    }
    if (s.Last(p)) FinishKeys<kL2Norm, Type, G>(dq, dk, smem, in);
    FinishGates<kGate, G>(dG, outside, smem, in, gate, p, ws, s);
    FenceProxyAsync();
    __syncthreads();
    if (ThreadIndex() == 0) {
      const GradientStep& next = *step(i + 1);
      if (kStages == 2 && next.item != kNoItem) load_queries(i + 1, next);
    }
    StoreGradients<G>(in, maps, b, s);
    if (ThreadIndex() == 0) {
      BulkCommit();
      const GradientStep& next = *step(i + 1);
      if (kStages == 1 && next.item != kNoItem) {
        BulkWaitRead();
        load_inputs(i + 1, next);
        load_queries(i + 1, next);
      }
    }
  }
  if (ThreadIndex() == 0) BulkWait();
}

}  // namespace jax_kda::sm90
