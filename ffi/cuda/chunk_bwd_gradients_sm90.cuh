// Gradients: q, k, g, beta, do of one chunk and query/key head with the records of the scans ->
// dq, dk, dg, dbeta, and what the chunk adds to dA_log and ddt_bias.
//
//   dAqk = scale tril(do v_new^T)      dAkk = -tril(dv v_new^T, -1)      dbeta = diagonal(y e^T)
//   row_q = scale do S                 row_k = -dv S                     col = v_new dS
//
// The pairs of tokens, and what a lane holds, are the business of chunk_bwd_levels_sm90.cuh.
//
// Grid: persistent, one block an SM. Block: 16 warps, 8 of each side.
#pragma once

#include <type_traits>

#include "chunk_bwd_levels_sm90.cuh"
#include "chunk_fwd_prepare_sm90.cuh"

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

// One thread: the records of a step, do, and what else the products take.
__device__ inline void LoadRecord(uint32_t smem, const GradientMaps& maps, const FwdParams& p,
                                  const BwdWorkspace& ws, const GradientStep& s) {
  using C = GradientsConfig;
  const int64_t at = int64_t{s.slot} * p.HV + s.h;
  const std::byte* record = ws.records + at * record::kBytes;
  const std::byte* image = ws.fwd.images + at * image::kGradientBytes;
  const uint32_t full = smem + C::kRecordFull;
  MbarrierExpectTx(full, record::kBytes + kTile + kHead * 4 + kChunk * 4);
  BulkLoad(smem + C::kE, record + record::kE, 2 * kTile, full);
  TmaLoad(smem + C::kDo, &maps.do_, full, s.h, s.chunk.token, 0);
  BulkLoad(smem + C::kBeta, image + image::kBeta, kChunk * 4, full);
  BulkLoad(smem + C::kDecay, image + image::kDecay, kHead * 4, full);
  BulkLoad(smem + C::kState, record + record::kState, 2 * record::kStateTile, full);
}
template <typename G>
__device__ inline void LoadInputs(uint32_t smem, const GradientMaps& maps, const FwdParams& p,
                                  const GradientStep& s) {
  using C = GradientsConfig;
  const uint32_t full = smem + C::kInputsFull;
  const bool wide = sizeof(G) == 4;
  MbarrierExpectTx(full, 2 * kTile + (wide ? s.chunk.valid * kHead * 4 : kTile));
  TmaLoad(smem + C::kQ, &maps.q, full, s.hq, s.chunk.token, 0);
  TmaLoad(smem + C::kK, &maps.k, full, s.hq, s.chunk.token, 0);
  if (wide) {
    const float* row =
        static_cast<const float*>(p.g) + (int64_t{s.chunk.token} * p.HV + s.h) * kHead;
#pragma unroll 1
    for (int t = 0; t < s.chunk.valid; ++t, row += p.HV * kHead) {
      BulkLoad(smem + C::kG + t * C::kWideRow, row, kHead * 4, full);
    }
  } else {
    TmaLoad(smem + C::kG, &maps.g, full, s.h, s.chunk.token, 0);
  }
}

// 1 / norm of 16 rows of q (warps 8-11) or k (warps 12-15), as in prepare but never 0: the gradient
// of a row of zeros is not 0.
__device__ __forceinline__ void GradientNorms(uint32_t smem) {
  using C = GradientsConfig;
  const int tid = ThreadIndex();
  const int warp = (tid >> 5) - 8, lane = tid & 31;
  const Corners at(lane);
  const uint32_t tile = smem + (warp < 4 ? C::kQ : C::kK);
  const int first = (warp & 3) * 16, g = lane >> 2, t = lane & 3;
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
    const uint32_t norms = smem + C::kNorms + (warp * 16 + g) * 4;
    StsF32(norms, Rsqrt((g & 1 ? low[1] : low[0]) + 1e-6f));
    StsF32(norms + 32, Rsqrt((g & 1 ? high[3] : high[2]) + 1e-6f));
  }
}

// dAqk (warps 0-3) and dAkk (warps 4-7), 16 rows a warp; the diagonals apart: of dAqk, which no
// decay is between, and of y e^T, which is dbeta.
__device__ __forceinline__ void PairGradients(uint32_t smem, const BwdParams& b,
                                              const GradientStep& s) {
  using C = GradientsConfig;
  const int tid = ThreadIndex();
  const int warp = tid >> 5, lane = tid & 31;
  const Corners at(lane);
  const bool of_q = warp < 4;
  const int I = warp & 3, g = lane >> 2, t = lane & 3;
  const uint32_t left = smem + (of_q ? C::kDo : C::kY);
  float d[8][4] = {};
#pragma unroll
  for (int step = 0; step < kHead / 16; ++step) {
    const uint32_t half = (step >> 2) * kHalfTile;
    const int piece = (step & 3) * 2;
    uint32_t a[4];
    Ldmatrix(a, left + half + Swizzled(I * 16 + at.down_first_row, piece + at.down_first_piece));
#pragma unroll
    for (int J = 0; J < 4; ++J) {
      if (J > I) break;
      uint32_t e[4];
      Ldmatrix(e, smem + C::kE + half +
                      Swizzled(J * 16 + at.right_first_row, piece + at.right_first_piece));
      Mma<Bf16>(d[2 * J], a, e[0], e[1]);
      Mma<Bf16>(d[2 * J + 1], a, e[2], e[3]);
    }
  }
  const FwdParams& p = b.fwd;
#pragma unroll
  for (int n = 0; n < 8; ++n) {
    if (n >> 1 > I) break;
    const int j = n * 8 + 2 * t;
    const float2 beta_j = LdsF32x2(smem + C::kBeta + j * 4);
#pragma unroll
    for (int upper = 0; upper < 2; ++upper) {
      const int i = I * 16 + upper * 8 + g;
      const bool valid = i < s.chunk.valid;  // past it do may hold NaN
      const float x = d[n][2 * upper], y = d[n][2 * upper + 1];
      if (valid && (i == j || i == j + 1)) {
        const float diagonal = i == j ? x : y;
        if (of_q) {
          StsF32(smem + C::kDiagonal + i * 4, p.scale * (i == j ? beta_j.x : beta_j.y) * diagonal);
        } else {
          const int64_t token = int64_t{s.chunk.token + i} * p.HV + s.h;
          float dbeta = diagonal;
          if (p.beta_mode != BetaMode::kProbability) {
            const float logit =
                p.beta_dtype == DType::kF32
                    ? static_cast<const float*>(p.beta)[token]
                    : __bfloat162float(static_cast<const __nv_bfloat16*>(p.beta)[token]);
            dbeta *= (i == j ? beta_j.x : beta_j.y) * Rcp(1.f + Ex2(kLog2E * logit));
          }
          if (p.beta_dtype == DType::kF32) {
            static_cast<float*>(b.dbeta)[token] = dbeta;
          } else {
            static_cast<__nv_bfloat16*>(b.dbeta)[token] = __float2bfloat16(dbeta);
          }
        }
      } else if (!valid && of_q && (i == j || i == j + 1)) {
        StsF32(smem + C::kDiagonal + i * 4, 0.f);
      }
      const float factor = of_q ? p.scale : -LdsF32(smem + C::kBeta + i * 4);
      const float low = valid && i > j ? factor * beta_j.x * x : 0.f;
      const float high = valid && i > j + 1 ? factor * beta_j.y * y : 0.f;
      const uint32_t pair = Pack<Bf16>(low, high);
      const uint32_t matrix = smem + (of_q ? C::kDAqk : C::kDAkk);
      if (of_q || i > j + 1) {
        Sts32(matrix + Swizzled(i, n) + t * 4, pair);
      } else if (i > j) {
        Sts16(matrix + Swizzled(i, n) + t * 4, pair);
      }
      if (!of_q) {  // mirrored
        const uint32_t mirrored = matrix + (i & 7) * 2;
        if (i > j) Sts16(mirrored + Swizzled(j, i >> 3), pair);
        if (i > j + 1) Sts16(mirrored + Swizzled(j + 1, i >> 3), pair >> 16);
        if (i == j) Sts16(matrix + Swizzled(i, n) + t * 4, 0);
        if (i == j + 1) Sts16(matrix + Swizzled(i, n) + t * 4 + 2, 0);
      }
    }
  }
}

// g of two tokens as it is given: from a register of LoadGates, or from the wide rows.
template <typename G>
__device__ __forceinline__ void LoadGates(uint32_t (&x)[4], uint32_t at) {
  if (sizeof(G) == 2) {
    LdmatrixTrans(x, at);
  } else {
    x[0] = x[1] = x[2] = x[3] = 0;
  }
}
template <typename G>
__device__ __forceinline__ float2 GatePairAt(uint32_t pair, uint32_t rows, int token, int channel) {
  if (sizeof(G) == 2) return {Bf16Lo(pair), Bf16Hi(pair)};
  const uint32_t at = rows + token * GradientsConfig::kWideRow + channel * 4;
  return {LdsF32(at), LdsF32(at + GradientsConfig::kWideRow)};
}

// The gate of a lane's two channels.
struct ChannelGate {
  GateParams params;
  float A;        // exp(A_log)
  float bias[2];  // dt_bias

  __device__ __forceinline__ ChannelGate(const FwdParams& p, int row, int h, int channel)
      : A(Ex2(kLog2E * (p.A_log == nullptr ? 0.f : p.A_log[row * p.A_log_stride + h]))),
        bias{0.f, 0.f} {
    params = {p.gate, kLog2E, -A};
    if (p.gate == Gate::kLowerBound) params = {p.gate, -kLog2E * A, p.lower_bound * kLog2E};
    if (p.dt_bias == nullptr) return;
    const float* from = p.dt_bias + row * p.dt_bias_stride + h * kHead + channel;
    bias[0] = from[0];
    bias[1] = from[8];
  }
};

// q and k normalised, in their places, and exp(g): of this warp's channels.
template <bool kL2Norm, typename G>
__device__ __forceinline__ void PrepareOperands(uint32_t smem, const FwdParams& p,
                                                const GradientStep& s) {
  using C = GradientsConfig;
  const GradientPlace at(smem);
  const ChannelGate gate(p, s.chunk.row, s.h, at.channel);
  const int valid = s.chunk.valid;
#pragma unroll
  for (int I = 0; I < 2; ++I) {
    uint32_t q[4], k[4], g_raw[4];
    float alpha[8];
    LdmatrixTrans(q, smem + C::kQ + at.own + I * 16 * 128);
    LdmatrixTrans(k, smem + C::kK + at.own + I * 16 * 128);
    LoadGates<G>(g_raw, smem + C::kG + at.own + I * 16 * 128);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int c = i & 1, token = at.token + 16 * I + 8 * (i >> 1);
      if (kL2Norm) {
        const float2 rq = LdsF32x2(smem + C::kNorms + token * 4),
                     rk = LdsF32x2(smem + C::kNorms + (kChunk + token) * 4);
        q[i] = Pack<Fp16>(Bf16Lo(q[i]) * rq.x, Bf16Hi(q[i]) * rq.y);
        k[i] = Pack<Fp16>(Bf16Lo(k[i]) * rk.x, Bf16Hi(k[i]) * rk.y);
      }
      const float2 x = GatePairAt<G>(g_raw[i], smem + C::kG, token, at.channel + 8 * c);
      float2 y = {(x.x + gate.bias[c]) * gate.params.slope,
                  (x.y + gate.bias[c]) * gate.params.slope};
      if (gate.params.gate == Gate::kSoftplus) {
        y = {gate.params.scale * Softplus2(y.x), gate.params.scale * Softplus2(y.y)};
      } else if (gate.params.gate == Gate::kLowerBound) {
        y = {gate.params.scale * Rcp(1.f + Ex2(y.x)), gate.params.scale * Rcp(1.f + Ex2(y.y))};
      }
      if (token + 1 >= valid) {  // selected away, since they may hold NaN
        const uint32_t kept = token < valid ? 0xffffu : 0u;
        q[i] &= kept;
        k[i] &= kept;
        y = {token < valid ? y.x : 0.f, 0.f};
      }
      alpha[2 * i] = Ex2(y.x);
      alpha[2 * i + 1] = Ex2(y.y);
    }
    StmatrixTrans(smem + C::kQ + at.own + I * 16 * 128, q[0], q[1], q[2], q[3]);
    StmatrixTrans(smem + C::kK + at.own + I * 16 * 128, k[0], k[1], k[2], k[3]);
    StsF32x4(at.Alphas(2 * I), &alpha[0]);
    StsF32x4(at.Alphas(2 * I + 1), &alpha[4]);
  }
  __syncwarp();
}

// The products with S and dS: row_q, row_k and col, which dq, dk and dG are made of, and what S
// with dS adds to dg of every token.
__device__ __forceinline__ void StateProducts(float (&dq)[4][4], float (&dk)[4][4],
                                              float (&dG)[4][4], float (&outside)[2], uint32_t smem,
                                              float scale, int valid) {
  using C = GradientsConfig;
  const GradientPlace at(smem);
  const uint32_t own_state = (at.warp >> 2) * record::kStateHalf + at.Column();
  float S_dS[2] = {0.f, 0.f};
#pragma unroll 1
  for (int step = 0; step < kHead / 16; ++step) {
    uint32_t S[4], dS[4];
    LdmatrixTrans(S, smem + C::kState + own_state + step * 16 * 128);
    LdmatrixTrans(dS, smem + C::kDState + own_state + step * 16 * 128);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      S_dS[i & 1] =
          fmaf(Bf16Lo(S[i]), Bf16Lo(dS[i]), fmaf(Bf16Hi(S[i]), Bf16Hi(dS[i]), S_dS[i & 1]));
    }
    const uint32_t from =
        smem + (step >> 2) * kHalfTile + at.side * 32 * 128 +
        Swizzled(at.corners.right_first_row, (step & 3) * 2 + at.corners.right_first_piece);
#pragma unroll
    for (int I = 0; I < 2; ++I) {
      uint32_t x[4];
      Ldmatrix(x, from + C::kDo + I * 16 * 128);
      Mma<Bf16>(dq[2 * I], S, x[0], x[1]);
      Mma<Bf16>(dq[2 * I + 1], S, x[2], x[3]);
      Ldmatrix(x, from + C::kY + I * 16 * 128);
      Mma<Bf16>(dk[2 * I], S, x[0], x[1]);
      Mma<Bf16>(dk[2 * I + 1], S, x[2], x[3]);
      Ldmatrix(x, from + C::kE + I * 16 * 128);
      Mma<Bf16>(dG[2 * I], dS, x[0], x[1]);
      Mma<Bf16>(dG[2 * I + 1], dS, x[2], x[3]);
    }
  }
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    // Both sides have the whole sum: one of them tells.
    outside[c] = at.side ? 0.f : S_dS[c] * LdsF32(smem + C::kDecay + (at.channel + 8 * c) * 4);
  }
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    const float2 beta = LdsF32x2(smem + C::kBeta + (at.token + 8 * n) * 4);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float beta_i = i & 1 ? beta.y : beta.x;
      dq[n][i] = at.token + 8 * n + (i & 1) < valid ? scale * dq[n][i] : 0.f;  // do: NaN, maybe
      dk[n][i] *= -beta_i;
      dG[n][i] *= beta_i;
    }
  }
}

// dG -> dg -> the gradient of the gate's input, in g's place, and of its parameters.
template <typename G>
__device__ __forceinline__ void FinishGates(float (&dG)[4][4], float (&outside)[2], uint32_t smem,
                                            const FwdParams& p, const BwdWorkspace& ws,
                                            const GradientStep& s) {
  using C = GradientsConfig;
  const GradientPlace at(smem);
  const int valid = s.chunk.valid;
  // dG -> dg: the sum over this token and all later ones, and what comes from outside.
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    outside[c] += __shfl_xor_sync(~0u, outside[c], 1);
    outside[c] += __shfl_xor_sync(~0u, outside[c], 2);
  }
  // What lies on the other side: all of it from outside, and dG of later tokens.
  {
    float total[2];
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      total[c] = (dG[0][2 * c] + dG[0][2 * c + 1] + dG[1][2 * c] + dG[1][2 * c + 1]) +
                 (dG[2][2 * c] + dG[2][2 * c + 1] + dG[3][2 * c] + dG[3][2 * c + 1]);
      total[c] += __shfl_xor_sync(~0u, total[c], 1);
      total[c] += __shfl_xor_sync(~0u, total[c], 2);
    }
    __syncthreads();  // dAkk has been read by all
    const uint32_t sides = smem + C::kSides + at.channel * 8;
    if (at.t == 0) {
      StsF32x2(sides + at.side * kHead * 8, total[0], outside[0]);
      StsF32x2(sides + at.side * kHead * 8 + 64, total[1], outside[1]);
    }
    __syncthreads();
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const float2 other = LdsF32x2(sides + (at.side ^ 1) * kHead * 8 + c * 64);
      outside[c] += (at.side ? 0.f : other.x) + other.y;
    }
  }
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
  const ChannelGate gate(p, s.chunk.row, s.h, at.channel);
  // By the gate's input. g is read again: its tile is this warp's alone, and dg goes there.
#pragma unroll
  for (int I = 0; I < 2; ++I) {
    uint32_t g_raw[4], packed[4];
    const float4 alpha[2] = {LdsF32x4(at.Alphas(2 * I)), LdsF32x4(at.Alphas(2 * I + 1))};
    LoadGates<G>(g_raw, smem + C::kG + at.own + I * 16 * 128);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int n = 2 * I + (i >> 1), c = i & 1, token = at.token + 8 * n;
      const uint32_t wide = smem + C::kG + token * C::kWideRow + (at.channel + 8 * c) * 4;
      const float2 pair = GatePairAt<G>(g_raw[i], smem + C::kG, token, at.channel + 8 * c);
      const float x[2] = {pair.x, pair.y};
      const float4 of_n = alpha[i >> 1];
      const float decay[2] = {c == 0 ? of_n.x : of_n.z, c == 0 ? of_n.y : of_n.w};
      float dx[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        // A gate that lets nothing through has a gradient of exactly 0.
        dx[e] = decay[e] == 0.f || token + e >= valid ? 0.f : dG[n][2 * c + e];
        if (p.gate == Gate::kActivated) continue;
        const float z = token + e < valid ? x[e] + gate.bias[c] : 0.f;
        const float y = z * gate.params.slope;
        const float falling = Rcp(1.f + Ex2(-y));
        if (p.gate == Gate::kSoftplus) {
          dA_log = fmaf(dx[e], gate.params.scale * Softplus2(y) * (1 / kLog2E), dA_log);
          dx[e] *= -gate.A * falling;
        } else {
          dx[e] *= gate.A * p.lower_bound * Rcp(1.f + Ex2(y)) * falling;
          dA_log = fmaf(dx[e], z, dA_log);
        }
        ddt_bias[c] += dx[e];
      }
      if (sizeof(G) == 4) {
        StsF32(wide, dx[0]);
        StsF32(wide + C::kWideRow, dx[1]);
      }
      packed[i] = Pack<Bf16>(dx[0], dx[1]);
    }
    if (sizeof(G) == 2) {
      StmatrixTrans(smem + C::kG + at.own + I * 16 * 128, packed[0], packed[1], packed[2],
                    packed[3]);
    }
  }
  if (p.gate != Gate::kActivated) {
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

// dq and dk of the normalised rows -> of the rows as they are given, in the places of q and k.
template <bool kL2Norm, typename Type>
__device__ __forceinline__ void FinishKeys(float (&dq)[4][4], float (&dk)[4][4], uint32_t smem) {
  using C = GradientsConfig;
  const GradientPlace at(smem);
  if (kL2Norm) {
    // q . dq and k . dk of every token: over a lane's channels, its warp's, all warps'.
    float dots[16];
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      uint32_t q[4], k[4];
      LdmatrixTrans(q, smem + C::kQ + at.own + (n >> 1) * 16 * 128);
      LdmatrixTrans(k, smem + C::kK + at.own + (n >> 1) * 16 * 128);
      const int half = (n & 1) * 2;
      const float2 q0 = Unpack<Type>(q[half]), q1 = Unpack<Type>(q[half + 1]);
      const float2 k0 = Unpack<Type>(k[half]), k1 = Unpack<Type>(k[half + 1]);
      dots[2 * n] = fmaf(q0.x, dq[n][0], q1.x * dq[n][2]);
      dots[2 * n + 1] = fmaf(q0.y, dq[n][1], q1.y * dq[n][3]);
      dots[8 + 2 * n] = fmaf(k0.x, dk[n][0], k1.x * dk[n][2]);
      dots[8 + 2 * n + 1] = fmaf(k0.y, dk[n][1], k1.y * dk[n][3]);
    }
    __syncthreads();  // dAqk has been read by all
    FoldSums<8>(dots, at.lane);
    FoldSums<4>(dots, at.lane);
    FoldSums<2>(dots, at.lane);
    // What is left is of q or k by lane bit 16, of n by the next two.
    const int first = (at.lane >> 4) * kChunk + (at.lane >> 2 & 3) * 8 + at.token;
    StsF32x2(smem + C::kDots + (at.warp * 2 * kChunk + first) * 4, dots[0], dots[1]);
    __syncthreads();
    if (const int tid = ThreadIndex(); tid < 2 * kChunk) {
      float sum = 0.f;
#pragma unroll
      for (int w = 0; w < 8; ++w) {
        sum += LdsF32(smem + C::kDots + (w * 2 * kChunk + tid) * 4);
      }
      StsF32(smem + C::kDots + tid * 4, sum);
    }
    __syncthreads();
  }
#pragma unroll
  for (int which = 0; which < 2; ++which) {
    float (&d)[4][4] = which == 0 ? dq : dk;
    const uint32_t tile = which == 0 ? smem + C::kQ + at.own : smem + C::kK + at.own;
#pragma unroll
    for (int I = 0; I < 2; ++I) {
      uint32_t x[4], o[4];
      LdmatrixTrans(x, tile + I * 16 * 128);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int n = 2 * I + (i >> 1), c = i & 1;
        float2 dx = {d[n][2 * c], d[n][2 * c + 1]};
        if (kL2Norm) {
          const uint32_t of_token = smem + (which * kChunk + at.token + 8 * n) * 4;
          const float2 dot = LdsF32x2(of_token + C::kDots), r = LdsF32x2(of_token + C::kNorms);
          const float2 pair = Unpack<Type>(x[i]);
          dx = {r.x * fmaf(-pair.x, dot.x, dx.x), r.y * fmaf(-pair.y, dot.y, dx.y)};
        }
        o[i] = Pack<Bf16>(dx.x, dx.y);
      }
      StmatrixTrans(tile + I * 16 * 128, o[0], o[1], o[2], o[3]);
    }
  }
}

// Whole chunks leave by the copy engine; of a partial one the rows after `valid` are not ours.
template <typename G>
__device__ __forceinline__ void StoreGradients(uint32_t smem, const GradientMaps& maps,
                                               const BwdParams& b, const GradientStep& s) {
  using C = GradientsConfig;
  const FwdParams& p = b.fwd;
  const bool last = s.Last(p);
  const int tid = ThreadIndex(), valid = s.chunk.valid;
  if (valid >= kChunk && tid == 0) {
    if (last) {
      TmaStore(&maps.dq, smem + C::kQ, s.hq, s.chunk.token, 0);
      TmaStore(&maps.dk, smem + C::kK, s.hq, s.chunk.token, 0);
    }
    if (sizeof(G) == 2) TmaStore(&maps.dg, smem + C::kG, s.h, s.chunk.token, 0);
  }
  if (sizeof(G) == 4 && tid == 0) {
    float* row = static_cast<float*>(b.dg) + (int64_t{s.chunk.token} * p.HV + s.h) * kHead;
#pragma unroll 1
    for (int i = 0; i < valid; ++i, row += p.HV * kHead) {
      BulkStore(row, smem + C::kG + i * C::kWideRow, kHead * 4);
    }
  }
  if (valid < kChunk) {
    for (int row = tid >> 4; row < valid; row += kGradientThreads / 16) {
      const int piece = tid & 15;
      const uint32_t from = smem + (piece >> 3) * kHalfTile + Swizzled(row, piece & 7);
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
    __syncthreads();
  }
}

template <bool kL2Norm, typename G>
__global__ void __launch_bounds__(kGradientThreads, 1)
    ChunkBwdGradientsKernel(const __grid_constant__ GradientMaps maps,
                            const __grid_constant__ BwdParams b,
                            const __grid_constant__ BwdWorkspace ws) {
  using C = GradientsConfig;
  using Type = std::conditional_t<kL2Norm, Fp16, Bf16>;  // of q and k as they are normalised
  extern __shared__ __align__(1024) uint8_t shared[];
  const uint32_t smem = SharedAddress(shared);
  const FwdParams& p = b.fwd;
  // Steps are in shared memory: registers are short.
  static_assert(sizeof(GradientStep) <= 64 && C::kSteps % 8 == 0);
  auto step = [&](uint32_t which) {
    return reinterpret_cast<GradientStep*>(shared + C::kSteps + which * 64);
  };
  if (ThreadIndex() == 0) {
    const GradientStep s = FindGradientStep(p, ws.fwd, blockIdx.x, 0);
    *step(0) = s;
    MbarrierInit(smem + C::kRecordFull, 1);
    MbarrierInit(smem + C::kInputsFull, 1);
    FenceMbarrierInit();
    if (s.item != kNoItem) {
      LoadInputs<G>(smem, maps, p, s);
      LoadRecord(smem, maps, p, ws, s);
    }
  }
  __syncthreads();
  for (uint32_t parity = 0; step(parity)->item != kNoItem; parity ^= 1) {
    const GradientStep& s = *step(parity);
    MbarrierWait(smem + C::kInputsFull, parity);
    MbarrierWait(smem + C::kRecordFull, parity);
    if (ThreadIndex() < kGradientThreads / 2) {
      PairGradients(smem, b, s);
    } else if (kL2Norm) {
      GradientNorms(smem);
    }
    __syncthreads();
    PrepareOperands<kL2Norm, G>(smem, p, s);
    float dq[4][4] = {}, dk[4][4] = {}, dG[4][4] = {}, outside[2];
    StateProducts(dq, dk, dG, outside, smem, p.scale, s.chunk.valid);
    __syncthreads();  // the record has been read
    ExchangeOperands<Type>(smem);
    __syncthreads();
    AddStateParts<Type>(dq, dk, dG, outside, smem);
    __syncwarp();  // ends what ptxas keeps of shared memory in registers, where they are short
    AddPairsOfSides(dq, dk, dG, smem);
    FenceProxyAsync();
    __syncthreads();  // what was exchanged has been read
    if (ThreadIndex() == 0) {
      const GradientStep next = NextGradientStep(p, ws.fwd, s);
      *step(parity ^ 1) = next;
      if (next.item != kNoItem) LoadRecord(smem, maps, p, ws, next);
    }
    AddPairsOf16<Type>(dq, dk, dG, smem);
    __syncwarp();
    AddPairsWithin<Type>(dq, dk, dG, smem);
    if (p.HV > p.H) AddGroup(dq, dk, ws, ThreadIndex(), s.r > 0, s.Last(p));
    if (s.Last(p)) FinishKeys<kL2Norm, Type>(dq, dk, smem);
    FinishGates<G>(dG, outside, smem, p, ws, s);
    FenceProxyAsync();
    __syncthreads();
    StoreGradients<G>(smem, maps, b, s);
    if (ThreadIndex() == 0) {
      BulkCommit();
      BulkWaitRead();
      const GradientStep& next = *step(parity ^ 1);
      if (next.item != kNoItem) LoadInputs<G>(smem, maps, p, next);
    }
  }
  if (ThreadIndex() == 0) BulkWait();
}

}  // namespace jax_kda::sm90
