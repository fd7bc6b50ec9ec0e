// The gradients of the pairs of tokens of a chunk, and the state's parts of dq, dk and dG: what the
// gradients kernel does with a chunk once dAqk, dAkk and the norms are in shared memory and the
// products with the states in registers.
//
// The chunk falls into blocks of 16 tokens. Every block I has an anchor in each channel, and with
// `head` the decay from it to a token and `tail` that from the token to it,
//
//   row_q_i = sum_j<=i dAqk_ij D(J, I) (k tail)_j      dq_i += head_i row_q_i
//   row_k_i = sum_j<i  dAkk_ij D(J, I) (k tail)_j      dk_i += head_i row_k_i
//   col_j   = sum_i>=j D(J, I) (dAqk_ij (q head)_i + dAkk_ij (k head)_i)      dk_j += tail_j col_j
//
// Sums go from block to block, begin with the products with S and dS, and are decayed on the way in
// fp32: three operands do for all pairs. dg_t is what the pairs j < t <= i leave over of a sum over
// all: the same rounded operands stand on both sides, so that the others cancel.
//
// The anchor is the middle of the block, where one of head and tail is above 1. So it has to be
// within range: no 8 tokens may decay to less than 2^-kWeakest. Where any of a pair of warps' do,
// the two of them anchor rows at the start of their block and columns at its end, so that every
// decay is at most 1; then the pairs within a block meet at one of four levels (8, 4, 2, 1), by the
// highest bit in which their places differ, with both ends decayed to the border between them.
#pragma once

#include <type_traits>

#include "chunk_bwd_place_sm90.cuh"
#include "chunk_fwd_prepare_sm90.cuh"

namespace jax_kda::sm90 {

// Decays within blocks of 2, 4 or 8 tokens, from exp(g) of a lane's two tokens and channels.
struct Decays {
  float from[4];  // from the block's start to the token, inclusive
  float to[4];    // after the token to the block's end
  float all[2];   // over the block, by channel

  // Blocks of 2.
  __device__ __forceinline__ Decays(float2 first, float2 second) {
    const float a[4] = {Ex2(first.x), Ex2(first.y), Ex2(second.x), Ex2(second.y)};
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const float both = a[2 * c] * a[2 * c + 1];
      from[2 * c] = a[2 * c];
      from[2 * c + 1] = both;
      to[2 * c] = a[2 * c + 1];
      to[2 * c + 1] = 1.f;
      all[c] = both;
    }
  }
  // Blocks of twice as many tokens, the other half with the lane `bit` away.
  __device__ __forceinline__ void Double(int bit, int t) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const float other = __shfl_xor_sync(~0u, all[c], bit);
      const float before = t & bit ? other : 1.f, after = t & bit ? 1.f : other;
      from[2 * c] *= before;
      from[2 * c + 1] *= before;
      to[2 * c] *= after;
      to[2 * c + 1] *= after;
      all[c] *= other;
    }
  }
};

// The lane's elements of one n-tile (8 tokens): [channel g or g + 8][token 2 t or 2 t + 1].
using Elements = float[4];

template <typename Type>
__device__ __forceinline__ float2 Unpack(uint32_t pair) {
  if (std::is_same_v<Type, Fp16>) return __half22float2(*reinterpret_cast<const __half2*>(&pair));
  return {Bf16Lo(pair), Bf16Hi(pair)};
}

// x f, rounded, as left operand.
template <typename Type>
__device__ __forceinline__ void Decayed(uint32_t (&xf)[2], const uint32_t* x, const Elements& f) {
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    const float2 pair = Unpack<Type>(x[c]);
    xf[c] = Pack<Bf16>(pair.x * f[2 * c], pair.y * f[2 * c + 1]);
  }
}

// What a level adds at the tokens of an n-tile, from the sums that the tensor cores made. sum_q is
// 0 where the tile is lower; `sign` is -1 there.
__device__ __forceinline__ void AddLevel(Elements& dq, Elements& dk, Elements& dG,
                                         const Elements& sum_q, const Elements& sum_k,
                                         const Elements& f, const uint32_t (&qf)[2],
                                         const uint32_t (&kf)[2], float sign) {
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    const float q[2] = {Bf16Lo(qf[c]), Bf16Hi(qf[c])}, k[2] = {Bf16Lo(kf[c]), Bf16Hi(kf[c])};
#pragma unroll
    for (int x = 0; x < 2; ++x) {
      const int i = 2 * c + x;
      dq[i] = fmaf(f[i], sum_q[i], dq[i]);
      dk[i] = fmaf(f[i], sum_k[i], dk[i]);
      dG[i] = fmaf(q[x], sum_q[i], fmaf(sign * k[x], sum_k[i], dG[i]));
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
  float A_log, bias[2];  // dt_bias

  __device__ __forceinline__ ChannelGate(const FwdParams& p, int row, int h, int channel)
      : A_log(p.A_log == nullptr ? 0.f : p.A_log[row * p.A_log_stride + h]), bias{0.f, 0.f} {
    if (p.dt_bias == nullptr) return;
    const float* from = p.dt_bias + row * p.dt_bias_stride + h * kHead + channel;
    bias[0] = from[0];
    bias[1] = from[8];
  }
  __device__ __forceinline__ float A() const { return Ex2(kLog2E * A_log); }
  template <Gate kGate>
  __device__ __forceinline__ GateParams Params(const FwdParams& p) const {
    if (kGate == Gate::kLowerBound) return {kGate, -kLog2E * A(), p.lower_bound * kLog2E};
    return {kGate, kLog2E, -A()};
  }
};

// Log decays, base 2, of the 16 tokens of this side's block I: y[i] of n-tile 2 I + (i >> 1),
// channel i & 1. `in`: the stage of inputs. Tokens of no sequence decay nothing: they are selected
// away, since they may hold NaN.
template <Gate kGate, typename G>
__device__ __forceinline__ void LogDecays(float2 (&y)[4], uint32_t in, const GradientPlace& at,
                                          const FwdParams& p, const ChannelGate& gate, int valid,
                                          int I) {
  for (float2& z : y) z = {0.f, 0.f};
  if (valid <= 0) return;  // never; but it keeps ptxas from mixing this with what is around it
  const GateParams params = gate.Params<kGate>(p);
  uint32_t g_raw[4];
  LoadGates<G>(g_raw, in + GradientsConfig::kG + at.own + I * at.kSixteen);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int c = i & 1, token = at.token + 16 * I + 8 * (i >> 1);
    const float2 x = GatePairAt<G>(g_raw[i], in + GradientsConfig::kG, token, at.channel + 8 * c);
    y[i] = {(x.x + gate.bias[c]) * params.slope, (x.y + gate.bias[c]) * params.slope};
  }
  if (kGate == Gate::kSoftplus) {
#pragma unroll
    for (float2& z : y) {
      z = {params.scale * Softplus2(z.x), params.scale * Softplus2(z.y)};
    }
  } else if (kGate == Gate::kLowerBound) {
#pragma unroll
    for (float2& z : y) {
      z = {params.scale * Rcp(1.f + Ex2(z.x)), params.scale * Rcp(1.f + Ex2(z.y))};
    }
  }
  if (valid < kChunk) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int token = at.token + 16 * I + 8 * (i >> 1);
      if (token + 1 >= valid) y[i] = {token < valid ? y[i].x : 0.f, 0.f};
    }
  }
}

// Sums of log decays within 8 tokens, from a lane's two: only sums of numbers <= 0, no differences.
struct SumsOf8 {
  float from[2];  // from the first token to this one, inclusive
  float to[2];    // after this one to the last
  float all;

  __device__ __forceinline__ SumsOf8(float2 y, int t) {
    const float two = y.x + y.y, one = __shfl_xor_sync(~0u, two, 1), four = two + one,
                other = __shfl_xor_sync(~0u, four, 2);
    const float before = (t & 1 ? one : 0.f) + (t & 2 ? other : 0.f),
                after = (t & 1 ? 0.f : one) + (t & 2 ? 0.f : other);
    from[0] = before + y.x;
    from[1] = before + two;
    to[0] = after + y.y;
    to[1] = after;
    all = four + other;
  }
};

// With log decays of at most this over 8 tokens, operands stay below 2^64 times q and k.
inline constexpr float kWeakest = 64.f;

// The exponents of `head` for anchors in the middle of blocks; `tail` has their negatives. Whether
// any is out of range goes to shared memory. `eights`: the sums over the 8 tokens of n-tile t,
// which have to wait until their place is free.
template <Gate kGate, typename G>
__device__ __forceinline__ void MiddleExponents(float (&exponents)[4][4], float (&eights)[2],
                                                uint32_t smem, uint32_t in, const FwdParams& p,
                                                const ChannelGate& gate, int valid) {
  const GradientPlace at(smem);
  bool strong = false;
#pragma unroll
  for (int I = 0; I < 2; ++I) {
    float2 y[4];
    LogDecays<kGate, G>(y, in, at, p, gate, valid, I);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int n = 2 * I + (i >> 1), c = i & 1;
      const SumsOf8 sums(y[i], at.t);
      exponents[n][2 * c] = n & 1 ? sums.from[0] : -sums.to[0];
      exponents[n][2 * c + 1] = n & 1 ? sums.from[1] : -sums.to[1];
      strong |= !(sums.all >= -kWeakest);
      eights[c] = n == 0 || at.t == n ? sums.all : eights[c];
    }
  }
  strong = __any_sync(~0u, strong);
  if (at.lane == 0) {
    Sts32(smem + GradientsConfig::kStrong + (at.side * 8 + at.warp) * 4, strong);
  }
}
__device__ __forceinline__ void StoreEights(const float (&eights)[2], uint32_t smem) {
  const GradientPlace at(smem);
  const uint32_t to = at.EightAt(4 * at.side + at.t);
  StsF32(to, eights[0]);
  StsF32(to ^ 32, eights[1]);
}
__device__ __forceinline__ bool AnyStrong(uint32_t smem) {
  const GradientPlace at(smem);
  const uint32_t of_warp = smem + GradientsConfig::kStrong + at.warp * 4;
  return (Lds32(of_warp) | Lds32(of_warp + 32)) != 0;
}

// head and tail of the 16 tokens of this side's block I, by n-tile, for rows anchored at the
// block's start and columns at its end.
template <Gate kGate, typename G>
__device__ __forceinline__ void EdgeDecays(float (&head)[2][4], float (&tail)[2][4], uint32_t smem,
                                           uint32_t in, const FwdParams& p, int row, int h,
                                           int valid, int I) {
  float2 y[4];
  const GradientPlace at(smem);
  LogDecays<kGate, G>(y, in, at, p, ChannelGate(p, row, h, at.channel), valid, I);
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    const SumsOf8 first(y[c], at.t), second(y[2 + c], at.t);
#pragma unroll
    for (int x = 0; x < 2; ++x) {
      head[0][2 * c + x] = Ex2(first.from[x]);
      head[1][2 * c + x] = Ex2(first.all + second.from[x]);
      tail[0][2 * c + x] = Ex2(first.to[x] + second.all);
      tail[1][2 * c + x] = Ex2(second.to[x]);
    }
  }
}

// Pairs within blocks, at levels 8, 4, 2 and 1. At the last three a pair of 8 tokens is of a level
// if that is the highest bit of its places, xored. What is small is read again for every product:
// registers are short, and time is not.
template <typename Type, Gate kGate, typename G>
__device__ __forceinline__ void AddPairsWithin(float (&dq)[4][4], float (&dk)[4][4],
                                               float (&dG)[4][4], uint32_t smem, uint32_t in,
                                               const FwdParams& p, int row, int h, int valid) {
  using C = GradientsConfig;
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    __syncwarp();
    const GradientPlace at(smem);
    const int I = n >> 1, half = n & 1, of_all = 2 * at.side + I;
    float2 y[4];
    LogDecays<kGate, G>(y, in, at, p, ChannelGate(p, row, h, at.channel), valid, I);
    Decays decays(y[2 * half], y[2 * half + 1]);
    uint32_t q[4], k[4], x[4];
    LdmatrixTrans(q, in + C::kQ + at.own + I * at.kSixteen);
    LdmatrixTrans(k, in + C::kK + at.own + I * at.kSixteen);
    Ldmatrix(x, at.Block(C::kDAqk, of_all, of_all));
    const uint32_t by_row = x[3 * half];
    LdmatrixTrans(x, at.BlockForTrans(C::kDAqk, of_all, of_all));
    const uint32_t by_column = x[3 * half];
    Ldmatrix(x, at.Block(C::kDAkk, of_all, of_all));
    uint32_t keys = x[3 * half];
    LdmatrixTrans(x, at.BlockForTrans(C::kDAkk, of_all, of_all));
    keys |= x[3 * half];  // either is 0
    const bool of_4 = (at.g >> 2) != (at.t >> 1), of_2 = !of_4 && (at.g >> 1 & 1) != (at.t & 1);
    const uint32_t masks[3] = {of_4 || of_2 ? 0u : ~0u, of_2 ? ~0u : 0u, of_4 ? ~0u : 0u};
#pragma unroll
    for (int level = 0; level < 3; ++level) {  // of 1 << level tokens
      if (valid <= 0) break;                   // never, as above
      const bool is_upper = at.t & (level == 2 ? 2 : 1);
      float f[4];
      if (level == 0) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          f[2 * c] = 1.f;
          f[2 * c + 1] = decays.to[2 * c];  // exp(g) of the second token
        }
      } else {
        if (level == 2) decays.Double(1, at.t);
#pragma unroll
        for (int i = 0; i < 4; ++i) f[i] = is_upper ? decays.from[i] : decays.to[i];
      }
      uint32_t qf[2], kf[2];
      Decayed<Type>(qf, &q[2 * half], f);
      Decayed<Type>(kf, &k[2 * half], f);
      float sum_q[4] = {}, sum_k[4] = {};
      MmaK8(sum_q, kf[0], kf[1], by_row & masks[level]);
      MmaK8(sum_k, kf[0], kf[1], keys & masks[level]);
      MmaK8(sum_k, qf[0], qf[1], by_column & masks[level]);
      if (level == 0) {  // a lane has one token of either kind
        kf[0] ^= 0x00008000u;
        kf[1] ^= 0x00008000u;
      }
      AddLevel(dq[n], dk[n], dG[n], sum_q, sum_k, f, qf, kf, level == 0 || is_upper ? 1.f : -1.f);
    }
  }
#pragma unroll
  for (int I = 0; I < 2; ++I) {
    __syncwarp();
    const GradientPlace at(smem);
    const int of_all = 2 * at.side + I;
    float f[2][4];
    {
      float2 y[4];
      LogDecays<kGate, G>(y, in, at, p, ChannelGate(p, row, h, at.channel), valid, I);
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const SumsOf8 first(y[c], at.t), second(y[2 + c], at.t);
#pragma unroll
        for (int x = 0; x < 2; ++x) {
          f[0][2 * c + x] = Ex2(first.to[x]);
          f[1][2 * c + x] = Ex2(second.from[x]);
        }
      }
    }
    uint32_t qf[2][2], kf[2][2], x[4];
    LdmatrixTrans(x, in + C::kQ + at.own + I * at.kSixteen);
    Decayed<Type>(qf[1], &x[2], f[1]);
    LdmatrixTrans(x, in + C::kK + at.own + I * at.kSixteen);
    Decayed<Type>(kf[0], &x[0], f[0]);
    Decayed<Type>(kf[1], &x[2], f[1]);
    float sum_q[4] = {}, sum_k[4] = {};
    const float none[4] = {};
    const uint32_t no_q[2] = {};
    Ldmatrix(x, at.Block(C::kDAqk, of_all, of_all));
    MmaK8(sum_q, kf[0][0], kf[0][1], x[2]);
    Ldmatrix(x, at.Block(C::kDAkk, of_all, of_all));
    MmaK8(sum_k, kf[0][0], kf[0][1], x[2]);
    AddLevel(dq[2 * I + 1], dk[2 * I + 1], dG[2 * I + 1], sum_q, sum_k, f[1], qf[1], kf[1], 1.f);
#pragma unroll
    for (float& sum : sum_k) sum = 0.f;
    LdmatrixTrans(x, at.BlockForTrans(C::kDAkk, of_all, of_all));
    MmaK8(sum_k, kf[1][0], kf[1][1], x[1]);
    LdmatrixTrans(x, at.BlockForTrans(C::kDAqk, of_all, of_all));
    MmaK8(sum_k, qf[1][0], qf[1][1], x[1]);
    AddLevel(dq[2 * I], dk[2 * I], dG[2 * I], none, sum_k, f[0], no_q, kf[0], -1.f);
  }
}

// Sums of a channel decay by block: acc of n-tiles 2 I and 2 I + 1 times f, by channel.
__device__ __forceinline__ void Decay(float (&acc)[4][4], int I, const float (&f)[2]) {
#pragma unroll
  for (int n = 2 * I; n < 2 * I + 2; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) acc[n][i] *= f[i >> 1];
  }
}
// acc of n-tiles 2 I and 2 I + 1 += left operand times right operands of both.
__device__ __forceinline__ void AddProduct(float (&acc)[4][4], int I, const uint4& left,
                                           const uint32_t (&x)[4]) {
  const uint32_t a[4] = {left.x, left.y, left.z, left.w};
  Mma<Bf16>(acc[2 * I], a, x[0], x[1]);
  Mma<Bf16>(acc[2 * I + 1], a, x[2], x[3]);
}

// q or k of 16 tokens -> as normalised, in its place, and its operand. `token`: the lane's first.
template <bool kL2Norm>
__device__ __forceinline__ void MakeHead(uint32_t (&x)[4], uint32_t place, uint32_t operand,
                                         const float (&head)[2][4], uint32_t norms, int token,
                                         int valid) {
  uint32_t x_head[4];
  LdmatrixTrans(x, place);
  if (valid < kChunk) {  // selected away, since they may hold NaN
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int first = token + 8 * (i >> 1);
      x[i] &= first + 1 < valid ? ~0u : first < valid ? 0xffffu : 0u;
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float2 r = {1.f, 1.f};
    if (kL2Norm) r = LdsF32x2(norms + (token + 8 * half) * 4);
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int i = 2 * half + c;
      float2 pair = {Bf16Lo(x[i]), Bf16Hi(x[i])};
      if (kL2Norm) {
        pair = {pair.x * r.x, pair.y * r.y};
        x[i] = Pack<Fp16>(pair.x, pair.y);
      }
      x_head[i] = Pack<Bf16>(pair.x * head[half][2 * c], pair.y * head[half][2 * c + 1]);
    }
  }
  StmatrixTrans(place, x[0], x[1], x[2], x[3]);
  Sts128(operand, {x_head[0], x_head[1], x_head[2], x_head[3]});
}

// All operands, with q and k as normalised in the places of q and k. `heads`: the exponents of
// anchors in the middle -> the decays. The products with dS, which dG begins with, have no others
// to cancel with but themselves at the chunk's end, so their factor is not rounded: `kept` is their
// sum by block and channel, and what the rounded k_tail leaves out of each goes to shared memory.
template <bool kStrong, bool kL2Norm, Gate kGate, typename G>
__device__ __forceinline__ void MakeOperands(float (&kept)[2][2], float (&dq)[4][4],
                                             float (&dk)[4][4], float (&dG)[4][4],
                                             float (&heads)[4][4], uint32_t smem, uint32_t in,
                                             const FwdParams& p, int row, int h, int valid) {
  using C = GradientsConfig;
  using Type = std::conditional_t<kL2Norm, Fp16, Bf16>;  // of q and k as they are normalised
  const GradientPlace at(smem);
#pragma unroll
  for (int I = 0; I < 2; ++I) {
    const int own = 2 * at.side + I, token = at.token + 16 * I;
    float head[2][4], tail[2][4];
    if (kStrong) {
      EdgeDecays<kGate, G>(head, tail, smem, in, p, row, h, valid, I);
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        float& exponent = heads[2 * I + (i >> 2)][i & 3];
        tail[i >> 2][i & 3] = Ex2(-exponent);
        head[i >> 2][i & 3] = exponent = Ex2(exponent);
      }
    }
    if (valid < kChunk) {  // of do, which may hold NaN
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if (token + 8 * (i >> 2) + (i & 1) >= valid) dq[2 * I + (i >> 2)][i & 3] = 0.f;
      }
    }
    uint32_t x[4], k_tail[4];
    MakeHead<kL2Norm>(x, in + C::kQ + at.own + I * at.kSixteen, at.Operand(C::kQHead, own), head,
                      smem + C::kNorms, token, valid);
    MakeHead<kL2Norm>(x, in + C::kK + at.own + I * at.kSixteen, at.Operand(C::kKHead, own), head,
                      smem + C::kNorms + kChunk * 4, token, valid);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int n = 2 * I + half, first = token + 8 * half;
      const float2 beta = LdsF32x2(smem + C::kBeta + first * 4);
      uint32_t rest[2];
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float2 k = Unpack<Type>(x[2 * half + c]);
        k = {k.x * tail[half][2 * c], k.y * tail[half][2 * c + 1]};
        const uint32_t rounded = k_tail[2 * half + c] = Pack<Bf16>(k.x, k.y);
        float* row_k = &dk[n][2 * c];
        float* col = &dG[n][2 * c];
        row_k[0] *= -beta.x;
        row_k[1] *= -beta.y;
        col[0] *= beta.x;
        col[1] *= beta.y;
        rest[c] = Pack<Bf16>((k.x - Bf16Lo(rounded)) * col[0], (k.y - Bf16Hi(rounded)) * col[1]);
        // As dG will have it, token by token: what nothing decays from cancels exactly.
        kept[I][c] += Bf16Lo(rest[c]) + Bf16Hi(rest[c]);
        kept[I][c] = fmaf(Bf16Lo(rounded), col[0], fmaf(Bf16Hi(rounded), col[1], kept[I][c]));
      }
      Sts64(at.RestAt<G>(in, n), rest[0], rest[1]);
    }
    Sts128(at.Operand(C::kKTail, own), {k_tail[0], k_tail[1], k_tail[2], k_tail[3]});
  }
}

// The sums -> dq, dk and dG; with the pairs i = j, which nothing decays.
template <bool kStrong, bool kL2Norm, Gate kGate, typename G>
__device__ __forceinline__ void FinishPairs(float (&dq)[4][4], float (&dk)[4][4], float (&dG)[4][4],
                                            const float (&heads)[4][4], uint32_t smem, uint32_t in,
                                            const FwdParams& p, int row, int h, int valid) {
  using C = GradientsConfig;
  using Type = std::conditional_t<kL2Norm, Fp16, Bf16>;  // of q and k as they are normalised
  const GradientPlace at(smem);
#pragma unroll
  for (int I = 0; I < 2; ++I) {
    uint32_t q[4], k[4];
    LdmatrixTrans(q, in + C::kQ + at.own + I * at.kSixteen);
    LdmatrixTrans(k, in + C::kK + at.own + I * at.kSixteen);
    float head[2][4], tail[2][4];
    if (kStrong) {
      EdgeDecays<kGate, G>(head, tail, smem, in, p, row, h, valid, I);
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        head[i >> 2][i & 3] = heads[2 * I + (i >> 2)][i & 3];
        tail[i >> 2][i & 3] = Rcp(head[i >> 2][i & 3]);
      }
    }
    const int own = 2 * at.side + I;
    const uint4 heads_q = Lds128(at.Operand(C::kQHead, own)),
                heads_k = Lds128(at.Operand(C::kKHead, own)),
                tails_k = Lds128(at.Operand(C::kKTail, own));
    const uint32_t q_head[4] = {heads_q.x, heads_q.y, heads_q.z, heads_q.w},
                   k_head[4] = {heads_k.x, heads_k.y, heads_k.z, heads_k.w},
                   k_tail[4] = {tails_k.x, tails_k.y, tails_k.z, tails_k.w};
    const float end[2] = {LdsF32(at.EndAt(I)), LdsF32(at.EndAt(I) ^ 32)};
    const uint2 rests[2] = {Lds64(at.RestAt<G>(in, 2 * I)), Lds64(at.RestAt<G>(in, 2 * I + 1))};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int n = 2 * I + (i >> 1), c = i & 1;
      const float2 diagonal = LdsF32x2(smem + C::kDiagonal + (at.token + 8 * n) * 4);
      const uint32_t rest = c ? rests[i >> 1].y : rests[i >> 1].x;
      const float2 q_pair = Unpack<Type>(q[i]), k_pair = Unpack<Type>(k[i]);
#pragma unroll
      for (int x = 0; x < 2; ++x) {
        const int e = 2 * c + x;
        const float qi = x ? q_pair.y : q_pair.x, ki = x ? k_pair.y : k_pair.x,
                    d = x ? diagonal.y : diagonal.x, qf = x ? Bf16Hi(q_head[i]) : Bf16Lo(q_head[i]),
                    kf = x ? Bf16Hi(k_head[i]) : Bf16Lo(k_head[i]),
                    kt = x ? Bf16Hi(k_tail[i]) : Bf16Lo(k_tail[i]);
        const float row_q = dq[n][e], row_k = dk[n][e], col = dG[n][e];
        const float of_k = fmaf(kt, col, (x ? Bf16Hi(rest) : Bf16Lo(rest)) * end[c]);
        dG[n][e] = fmaf(qf, row_q, fmaf(kf, row_k, -of_k));
        dq[n][e] = fmaf(head[i >> 1][e], row_q, d * ki);
        dk[n][e] = fmaf(head[i >> 1][e], row_k, fmaf(tail[i >> 1][e], col, d * qi));
      }
    }
  }
}

// do S, y S and e dS, in dq, dk and dG -> dq, dk and dG of q and k as they are normalised, which
// take the places of q and k. `heads`: the exponents of anchors in the middle.
template <bool kStrong, bool kL2Norm, Gate kGate, typename G>
__device__ __forceinline__ void AddPairs(float (&dq)[4][4], float (&dk)[4][4], float (&dG)[4][4],
                                         float (&heads)[4][4], uint32_t smem, uint32_t in,
                                         const FwdParams& p, int row, int h, int valid) {
  using C = GradientsConfig;
  using Type = std::conditional_t<kL2Norm, Fp16, Bf16>;  // of q and k as they are normalised
  float kept[2][2] = {};
  MakeOperands<kStrong, kL2Norm, kGate, G>(kept, dq, dk, dG, heads, smem, in, p, row, h, valid);
  const GradientPlace at(smem);
  // Decays between anchors: rows meet F[J] before block J, columns F[I + 1] after block I. With
  // anchors at the edges F[J] is block J's, for rows after it and for columns before it.
  float F[5][2];
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    float eight[8];
#pragma unroll
    for (int n = 0; n < 8; ++n) eight[n] = LdsF32(at.EightAt(n) ^ (c * 32));
#pragma unroll
    for (int J = 0; J < 4; ++J) {
      F[J][c] = Ex2(kStrong ? eight[2 * J] + eight[2 * J + 1]
                    : J > 0 ? eight[2 * J - 1] + eight[2 * J]
                            : eight[0]);
    }
    F[4][c] = kStrong ? 1.f : Ex2(eight[7]);
  }
  float ends[2][2];  // by block and channel, the decay to the chunk's end
#pragma unroll
  for (int c = 0; c < 2; ++c) {  // what the keys of both blocks keep decays to the chunk's end
    ends[1][c] = at.side ? F[4][c] : F[4][c] * F[3][c] * F[2][c];
    ends[0][c] = ends[1][c] * (at.side ? F[3][c] : F[1][c]);
    float sum = fmaf(kept[0][c], ends[0][c], kept[1][c] * ends[1][c]);
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    const uint32_t side = at.SideAt(at.side) + 32 * c;
    if (at.t == 0) StsF32(side, LdsF32(side) + sum);
  }
  BarSync(1 + at.warp, 64);  // operands of the other side; it has read the decays as well
  if (at.t == 0) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      StsF32(at.EndAt(i >> 1) ^ ((i & 1) * 32), ends[i >> 1][i & 1]);
    }
  }
  __syncwarp();

  // The first decay of do S has its scale as well.
#pragma unroll
  for (int J = 0; J < 4; ++J) {
    if (J >= 2 && at.side == 0) break;
    const uint4 k_tail = Lds128(at.Operand(C::kKTail, J));
#pragma unroll
    for (int I = 0; I < 2; ++I) {
      if (I == 0 && (J & 1) && at.side == J >> 1) continue;  // above the diagonal
      if (kStrong && I == (J & 1) && at.side == J >> 1) {
        const float scale[2] = {p.scale, p.scale};
        if (J == 0) Decay(dq, I, scale);
        continue;
      }
      const int own = 2 * at.side + I;
      uint32_t x[4];
      const float scale = J == 0 ? p.scale : 1.f, of_q[2] = {scale * F[J][0], scale * F[J][1]};
      Decay(dq, I, of_q);
      Decay(dk, I, F[J]);
      Ldmatrix(x, at.Block(C::kDAqk, own, J));
      AddProduct(dq, I, k_tail, x);
      Ldmatrix(x, at.Block(C::kDAkk, own, J));
      AddProduct(dk, I, k_tail, x);
    }
  }
#pragma unroll
  for (int I = 3; I >= 0; --I) {
    if (I < 2 && at.side == 1) break;
    const uint4 q_head = Lds128(at.Operand(C::kQHead, I)),
                k_head = Lds128(at.Operand(C::kKHead, I));
#pragma unroll
    for (int J = 0; J < 2; ++J) {
      if (J == 1 && (I & 1) == 0 && at.side == I >> 1) continue;  // above the diagonal
      if (kStrong && J == (I & 1) && at.side == I >> 1) continue;
      const int own = 2 * at.side + J;
      uint32_t x[4];
      Decay(dG, J, F[kStrong ? I : I + 1]);
      LdmatrixTrans(x, at.BlockForTrans(C::kDAqk, I, own));
      AddProduct(dG, J, q_head, x);
      LdmatrixTrans(x, at.BlockForTrans(C::kDAkk, I, own));
      AddProduct(dG, J, k_head, x);
    }
  }

  FinishPairs<kStrong, kL2Norm, kGate, G>(dq, dk, dG, heads, smem, in, p, row, h, valid);
  if (kStrong) AddPairsWithin<Type, kGate, G>(dq, dk, dG, smem, in, p, row, h, valid);
}

}  // namespace jax_kda::sm90
