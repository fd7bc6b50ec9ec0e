// Prepare: q, k, g, beta of one chunk and value head -> its image (chunk_fwd_sm90.cuh).
//
// Warp w owns the octet of tokens 8 w to 8 w + 7. With c_i the sum of its log decays up to token i
// and c_7 the whole, an octet's operands are
//
//   q_up_i = q_i exp(c_i)    k_up_i = k_i exp(c_i)    k_down_j = k_j exp(c_7 - c_j)
//
// A pair of tokens i > j of different octets is  q_up_i (decay of the octets between) k_down_j, all
// factors at most 1: tensor cores, with the decay between, one factor a channel, multiplied onto the
// fragments. What the scan wants, the decay from the chunk's start or to its end, is one more factor
// an octet and channel.
//
// Within an octet a pair is  (q_i exp(c_i)) (k_j exp(-c_j))  in TF32, which has the range for it
// while c_7 >= -64 in base 2. Gates beyond that are no special case of the result, only of the work:
// from the first token on where some channel's sum is below -64, rows are computed pair by pair from
// products of exp(g) <= 1 (StrongOctet). So any gate works, underflow to 0 is the right answer, -inf
// is a reset, and no token's bits depend on a later one.
//
// Grid: x = value head, y and z = chunk slot. Block: 8 warps. Three blocks share an SM: 76,576 bytes,
// 80 registers a thread.
#pragma once

#include <type_traits>

#include "chunk_fwd_sm90.cuh"
#include "unit_lower_inverse_sm90.cuh"

namespace jax_kda::sm90 {

inline constexpr float kLog2E = 1.4426950408889634f;

struct PrepareConfig {
  static constexpr int kThreads = 256;
  static constexpr int kOctet = 8;  // tokens a warp

  // Shared memory, bytes. Lifetimes: sums of an octet, then factors between octets, both a warp's
  // own, then the blocks of I + L, of its inverse, and A_inv; decays of octets, then Aqk.
  static constexpr int kQ = 0, kK = kTile, kKDown = 2 * kTile;
  static constexpr int kOwn = 3 * kTile, kL = kOwn, kAInv = kOwn;
  static constexpr int kSumRow = 64 * 4 + 32;  // 64 channels; the 32 put rows on different banks
  static constexpr int kOwnBytes = kOctet * kSumRow;
  static constexpr int kFactorRow = kHead * 2;  // of 16-bit factors
  static constexpr int kScratch = kL + 10 * kBlock;
  static constexpr int kDecays = kOwn + 8 * kOwnBytes;    // [8, K] fp32, of each octet
  static constexpr int kLogDecays = kDecays + 8 * kHead * 4;  // [8, K] fp32, base 2
  static constexpr int kAqk = kDecays;                        // [64, 64]
  static constexpr int kDecay = kAqk + kMatrix;       // [K] fp32
  static constexpr int kWrites = kDecay + kHead * 4;  // behind the decay, as in the image
  static constexpr int kBeta = kWrites + 16;
  static constexpr int kBarrier = kBeta + kChunk * 4;
  static constexpr int kBytes = kBarrier + 16;
  static_assert(kScratch + 4 * kBlock <= kDecays && 6 * kFactorRow <= kOwnBytes);
  static_assert(3 * (kBytes + 1024) <= 228 * 1024,
                "three blocks an SM, each with 1 KB of the system's");

  // Below this sum of log decays, base 2, an octet's products leave TF32's range.
  static constexpr float kStrong = -64.f;
};

template <typename G>
struct GatePair;  // two neighbouring channels of g
template <>
struct GatePair<__nv_bfloat16> {
  uint32_t bits;
  __device__ float2 Floats() const { return {Bf16Lo(bits), Bf16Hi(bits)}; }
};
template <>
struct GatePair<float> {
  float2 pair;
  __device__ float2 Floats() const { return pair; }
};

// log2(exp(g)) of gate input x, with y = x slope + bias:
//   activated    y
//   softplus     scale softplus(x + dt_bias)              y = log2(e) (x + dt_bias)
//   lower bound  scale sigmoid(exp(A_log) (x + dt_bias))  y = -log2(e) exp(A_log) (x + dt_bias)
struct GateParams {
  Gate gate;
  float slope, scale;
};
// log2(1 + 2^y). lg2.approx has an absolute error, so small 2^y take the series; beyond 2^20 it is
// y itself.
__device__ __forceinline__ float Softplus2(float y) {
  const float z = Ex2(y);
  const float series = z * kLog2E * (1.f - z * (0.5f - z * (1.f / 3 - z * (0.25f - z * 0.2f))));
  return z < 0.0625f ? series : y > 20.f ? y : Lg2(1.f + z);
}

// Log decays, base 2, of gate inputs x, but for the factor p.scale of the last two gates, in place.
template <int N>
__device__ __forceinline__ void GateDecays(float2 (&x)[N], const GateParams& p, float2 bias) {
#pragma unroll
  for (float2& y : x) y = {fmaf(y.x, p.slope, bias.x), fmaf(y.y, p.slope, bias.y)};
  // Uniform, and around the loops, so that the elements overlap.
  if (p.gate == Gate::kSoftplus) {
#pragma unroll
    for (float2& y : x) y = {Softplus2(y.x), Softplus2(y.y)};
  } else if (p.gate == Gate::kLowerBound) {
#pragma unroll
    for (float2& y : x) y = {Rcp(1.f + Ex2(y.x)), Rcp(1.f + Ex2(y.y))};
  }
}

// What a warp knows of its octet.
struct Octet {
  int left;            // tokens of the sequence from its first one on: rows beyond are not ours
  float q_norm, k_norm;  // 1 / norm of row lane / 4, 0 of a row of zeros; 1 if not normalised
};

// Norms by tensor cores: the diagonal of x x^T, whose right operand is the left's registers. q and
// k are stacked: accumulators 0, 1 are q's row lane / 4, 2, 3 are k's.
__device__ __forceinline__ void RowNorms(Octet& octet, uint32_t fragment, int lane) {
  float q[4] = {}, k[4] = {};
#pragma unroll
  for (int step = 0; step < kHead / 16; ++step) {
    uint32_t x[4];
    Ldmatrix(x, (fragment ^ (step & 3) << 5) + (step >> 2) * kHalfTile);
    Mma<Bf16>(q, x, x[0], x[2]);
    Mma<Bf16>(k, x, x[1], x[3]);
  }
  const int row = lane >> 2, diagonal = (lane & ~3) | row >> 1;
  const float q2 = __shfl_sync(~0u, row & 1 ? q[1] : q[0], diagonal),
              k2 = __shfl_sync(~0u, row & 1 ? k[3] : k[2], diagonal);
  octet.q_norm = q2 == 0.f ? 0.f : Rsqrt(q2 + 1e-6f);
  octet.k_norm = k2 == 0.f ? 0.f : Rsqrt(k2 + 1e-6f);
}

// fp32 bits whose upper 19, which are what TF32 products read, are x rounded to nearest.
__device__ __forceinline__ uint32_t RoundTf32(float x) { return __float_as_uint(x) + 0x1000u; }

// This warp's octet: q_up, k_up and k_down in place of q and k, its decays, and the products of its
// own pairs: c 0, 1 are q_i k_j of row i = lane / 4 and columns j = 2 (lane % 4) and the next, c 2, 3
// are k_i k_j. Whether some channel is stronger than TF32 can take.
template <typename Operand, bool kL2Norm, typename G>
__device__ __forceinline__ bool BuildOctet(float (&c)[4], uint32_t smem,
                                           const GatePair<G> (&all_g)[2][8],
                                           const float2 (&bias)[2], const GateParams& gate,
                                           const Octet& octet, int warp, int lane) {
  using C = PrepareConfig;
  const int row = lane >> 2, t = lane & 3;
  const uint32_t own = smem + C::kOwn + warp * C::kOwnBytes;
  const uint32_t sums = own + row * C::kSumRow + t * 8;
  // Matrices of fragments: q's and k's channels 0-7, q's and k's channels 8-15 of a step.
  const uint32_t fragment = smem + (lane & 8 ? C::kK : C::kQ) +
                            Swizzled(warp * 8 + (lane & 7), lane >> 4);
  const uint32_t down = smem + C::kKDown + Swizzled(warp * 8 + (lane & 7), lane >> 3);
  const uint32_t decays = smem + C::kDecays + warp * kHead * 4;
  bool strong = false;
  GatePair<G> g[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) g[i] = all_g[0][i];
#pragma unroll 1  // straight code would miss the instruction cache
  for (int half = 0; half < 2; ++half) {
    {
      float2 x[8], sum = {0.f, 0.f};
#pragma unroll
      for (int i = 0; i < 8; ++i) x[i] = g[i].Floats();
      GateDecays(x, gate, half == 0 ? bias[0] : bias[1]);
      const float scale = gate.gate == Gate::kActivated ? 1.f : gate.scale;
      __syncwarp();
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if (i < octet.left) sum = {fmaf(x[i].x, scale, sum.x), fmaf(x[i].y, scale, sum.y)};
        StsF32x2(own + i * C::kSumRow + lane * 8, sum.x, sum.y);
      }
      strong |= fminf(sum.x, sum.y) < C::kStrong;
      StsF32x2(decays + half * 256 + lane * 8, Ex2(sum.x), Ex2(sum.y));
      StsF32x2(decays + half * 256 + lane * 8 + (C::kLogDecays - C::kDecays), sum.x, sum.y);
      __syncwarp();
    }
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {  // of steps
      uint32_t k_down[4];
#pragma unroll
      for (int u = 0; u < 2; ++u) {
        const int step = 2 * pair + u;  // 16 channels: this lane's are 2 t, 2 t + 1, 2 t + 8, 2 t + 9
        const uint32_t at = (fragment ^ step << 5) + half * kHalfTile;
        uint32_t x[4];
        Ldmatrix(x, at);
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          const float2 sum = LdsF32x2(sums + step * 64 + m * 32);
          const float2 total = LdsF32x2(decays + half * 256 + t * 8 + step * 64 + m * 32);
          float2 q = {Bf16Lo(x[2 * m]), Bf16Hi(x[2 * m])},
                 k = {Bf16Lo(x[2 * m + 1]), Bf16Hi(x[2 * m + 1])};
          if (kL2Norm) {
            q = {q.x * octet.q_norm, q.y * octet.q_norm};
            k = {k.x * octet.k_norm, k.y * octet.k_norm};
          }
          const float2 up = {Ex2(sum.x), Ex2(sum.y)};
          const float2 left = {k.x * Ex2(-sum.x), k.y * Ex2(-sum.y)};
          q = {q.x * up.x, q.y * up.y};
          k = {k.x * up.x, k.y * up.y};
          const uint32_t a[4] = {RoundTf32(q.x), RoundTf32(k.x), RoundTf32(q.y), RoundTf32(k.y)};
          MmaTf32(c, a, RoundTf32(left.x), RoundTf32(left.y));
          x[2 * m] = Pack<Operand>(q.x, q.y);
          x[2 * m + 1] = Pack<Operand>(k.x, k.y);
          k_down[2 * u + m] = Pack<Operand>(left.x * total.x, left.y * total.y);
        }
        Stmatrix(at, x[0], x[1], x[2], x[3]);
      }
      Stmatrix((down ^ pair << 6) + half * kHalfTile, k_down[0], k_down[1], k_down[2], k_down[3]);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) g[i] = all_g[1][i];
  }
  return __any_sync(~0u, strong);
}

// Four neighbouring channels of a token, as given.
template <typename T>
__device__ __forceinline__ float4 LoadChannels(const void* base, int64_t at) {
  if constexpr (sizeof(T) == 4) {
    return *reinterpret_cast<const float4*>(static_cast<const float*>(base) + at);
  } else {
    const uint2 x = *reinterpret_cast<const uint2*>(static_cast<const __nv_bfloat16*>(base) + at);
    return {Bf16Lo(x.x), Bf16Hi(x.x), Bf16Lo(x.y), Bf16Hi(x.y)};
  }
}

// An octet whose decays leave TF32's range, from the inputs: k_down anew, and the rows of c from the
// first on that has such a decay. Every decay is a product of exp(g) <= 1. Slow: 1,000 and more
// instructions a row.
template <typename Operand, bool kL2Norm, typename G>
__device__ __forceinline__ void StrongOctet(float (&c)[4], uint32_t smem, const FwdParams& p,
                                            const ChunkSlot& chunk, const GateParams& gate,
                                            const Octet& octet, int h, int warp, int lane) {
  using C = PrepareConfig;
  const int K = static_cast<int>(p.K), channel = 4 * lane;
  const int64_t HV = p.HV, token = int64_t{chunk.token} + warp * 8;
  const int qk_head = static_cast<int>(h / (HV / p.H));
  float4 bias = {0.f, 0.f, 0.f, 0.f};
  if (channel < K && p.dt_bias != nullptr) {
    bias = LoadChannels<float>(p.dt_bias, chunk.row * p.dt_bias_stride + h * K + channel);
  }
  auto row_of = [&](const void* base, int i, float norm) -> float4 {
    const float r = __shfl_sync(~0u, norm, 4 * i);
    if (i >= octet.left || channel >= K) return {0.f, 0.f, 0.f, 0.f};
    const float4 x = LoadChannels<__nv_bfloat16>(base, ((token + i) * p.H + qk_head) * K + channel);
    return kL2Norm ? float4{x.x * r, x.y * r, x.z * r, x.w * r} : x;
  };
  auto log_decays = [&](int i) -> float4 {
    if (i >= octet.left || channel >= K) return {0.f, 0.f, 0.f, 0.f};
    const float4 x = LoadChannels<G>(p.g, ((token + i) * HV + h) * K + channel);
    float2 y[1] = {{x.x, x.y}}, z[1] = {{x.z, x.w}};
    GateDecays(y, gate, {bias.x * gate.slope, bias.y * gate.slope});
    GateDecays(z, gate, {bias.z * gate.slope, bias.w * gate.slope});
    const float scale = gate.gate == Gate::kActivated ? 1.f : gate.scale;
    return {y[0].x * scale, y[0].y * scale, z[0].x * scale, z[0].y * scale};
  };
  auto decay = [&](float4& x, int i) {
    const float4 log2_a = log_decays(i);
    x = {x.x * Ex2(log2_a.x), x.y * Ex2(log2_a.y), x.z * Ex2(log2_a.z), x.w * Ex2(log2_a.w)};
  };
  auto dot = [](float4 x, float4 y) {
    return fmaf(x.x, y.x, fmaf(x.y, y.y, fmaf(x.z, y.z, x.w * y.w)));
  };

  __syncwarp();
  float4 d = {1.f, 1.f, 1.f, 1.f};
#pragma unroll 1
  for (int j = 7; j >= 0; --j) {
    const float4 k = row_of(p.k, j, octet.k_norm);
    const uint32_t at = smem + C::kKDown + (lane >> 4) * kHalfTile +
                        Swizzled(warp * 8 + j, lane >> 1 & 7) + (lane & 1) * 8;
    Sts32(at, Pack<Operand>(k.x * d.x, k.y * d.y));
    Sts32(at + 4, Pack<Operand>(k.z * d.z, k.w * d.w));
    decay(d, j);
  }
  float4 sum = {0.f, 0.f, 0.f, 0.f};
  int first = 8;
#pragma unroll 1
  for (int i = 0; i < 8 && first == 8; ++i) {
    const float4 x = log_decays(i);
    sum = {sum.x + x.x, sum.y + x.y, sum.z + x.z, sum.w + x.w};
    const bool strong = fminf(fminf(sum.x, sum.y), fminf(sum.z, sum.w)) < C::kStrong;
    if (__any_sync(~0u, strong)) first = i;
  }
#pragma unroll 1
  for (int i = first; i < 8; ++i) {
    float4 q = row_of(p.q, i, octet.q_norm), k = row_of(p.k, i, octet.k_norm);
#pragma unroll 1
    for (int j = i; j >= 0; --j) {
      const float4 other = row_of(p.k, j, octet.k_norm);
      float qk = dot(q, other), kk = dot(k, other);
#pragma unroll
      for (int mask = 16; mask > 0; mask >>= 1) {
        qk += __shfl_xor_sync(~0u, qk, mask);
        kk += __shfl_xor_sync(~0u, kk, mask);
      }
      if (lane >> 2 == i && (lane & 3) == j >> 1) {
        c[0] = j & 1 ? c[0] : qk;
        c[1] = j & 1 ? qk : c[1];
        c[2] = j & 1 ? c[2] : kk;
        c[3] = j & 1 ? kk : c[3];
      }
      decay(q, j);
      decay(k, j);
    }
  }
  __syncwarp();
}

// The octets that a warp pairs: of a later one `row` with earlier ones, `first` and down, `count` of
// them. Warps 4 to 7 take four earlier octets of their own; warps 0 to 3 all of their own and what is
// left of octet 7 - warp: three in all.
struct OctetPairs {
  int row, first, count;
};
__device__ __forceinline__ OctetPairs OwnPairs(int warp) {
  return warp < 4 ? OctetPairs{warp, warp - 1, warp} : OctetPairs{warp, 3, 4};
}
__device__ __forceinline__ OctetPairs HelpedPairs(int warp) {
  return {7 - warp, 6 - warp, warp < 4 ? 3 - warp : 0};
}

__device__ __forceinline__ float4 Product(float4 x, float4 y) {
  return {x.x * y.x, x.y * y.y, x.z * y.z, x.w * y.w};
}

// Factors between octets, as operands, and from the chunk's start to this warp's octet and from its
// end to the chunk's, to this warp's own memory: a row each, pairs first. A lane takes four channels.
// In the rows of pairs what a lane of a fragment wants of 32 channels lies side by side: 2 t, 2 t + 1
// and the same 8, 16, 24 further on.
template <typename Operand>
__device__ __forceinline__ void BuildFactors(uint32_t smem, int warp, int lane) {
  using C = PrepareConfig;
  const uint32_t own = smem + C::kOwn + warp * C::kOwnBytes;
  const uint32_t pair_at = own + (lane >> 3) * 64 + (lane & 1) * 32 + (lane >> 1 & 3) * 4;
  const uint32_t decays = smem + C::kDecays + lane * 16;
  auto octet = [&](int o) { return LdsF32x4(decays + o * kHead * 4); };
  auto store_pair = [&](int n, float4 x) {
    Sts32(pair_at + n * C::kFactorRow, Pack<Operand>(x.x, x.y));
    Sts32(pair_at + n * C::kFactorRow + 16, Pack<Operand>(x.z, x.w));
  };
  auto store = [&](int n, float4 x) {
    const uint32_t at = own + n * C::kFactorRow + lane * 8;
    Sts32(at, Pack<Operand>(x.x, x.y));
    Sts32(at + 4, Pack<Operand>(x.z, x.w));
  };
  constexpr float4 kOne = {1.f, 1.f, 1.f, 1.f};
  float4 x = kOne;
#pragma unroll 1
  for (int o = warp - 1; o >= 4; --o) x = Product(x, octet(o));
  const OctetPairs mine = OwnPairs(warp), helped = HelpedPairs(warp);
#pragma unroll 1
  for (int n = 0; n < mine.count; ++n) {
    store_pair(n, x);
    x = Product(x, octet(mine.first - n));
  }
  store(4, x);
  x = kOne;
#pragma unroll 1
  for (int n = 0; n < helped.count; ++n) {
    store_pair(mine.count + n, x);
    x = Product(x, octet(helped.first - n));
  }
  x = kOne;
#pragma unroll 1
  for (int o = warp + 1; o < 8; ++o) x = Product(x, octet(o));
  store(5, x);
}

// Products of octet pairs, at most kMax; c as in BuildOctet. `factors`: the first pair's row.
template <typename Operand, int kMax>
__device__ __forceinline__ void PairProducts(float (*c)[4], uint32_t smem, uint32_t factors,
                                             const OctetPairs& pairs, int lane) {
  using C = PrepareConfig;
  if (pairs.count == 0) return;
  const uint32_t left = smem + (lane & 8 ? C::kK : C::kQ) +
                        Swizzled(pairs.row * 8 + (lane & 7), lane >> 4);
  const uint32_t right = smem + C::kKDown + Swizzled(pairs.first * 8 + (lane & 7), lane >> 3);
  factors += (lane & 3) * 16;
#pragma unroll 1
  for (int step = 0; step < kHead / 32; ++step) {
    const uint32_t half = (step >> 1) * kHalfTile, piece = (step & 1) << 6;
    uint32_t a0[4], a1[4];
    Ldmatrix(a0, (left ^ piece) + half);
    Ldmatrix(a1, (left ^ piece ^ 32) + half);
#pragma unroll
    for (int n = 0; n < kMax; ++n) {
      if (n < pairs.count) {
        uint32_t b[4];
        Ldmatrix(b, (right ^ piece) + half - n * 1024);
        const uint4 f = Lds128(factors + n * C::kFactorRow + step * 64);
        Mma<Operand>(c[n], a0, MulX2<Operand>(b[0], f.x), MulX2<Operand>(b[1], f.y));
        Mma<Operand>(c[n], a1, MulX2<Operand>(b[2], f.z), MulX2<Operand>(b[3], f.w));
      }
    }
  }
}

// Octet operands -> chunk operands, in place, of this warp's octet: q_decayed, k_decayed,
// k_restored. A lane takes a 16-byte piece of every other row, with factors before and after.
template <typename Operand>
__device__ __forceinline__ void ExtendToChunk(uint32_t smem, uint4 before, uint4 after, int warp,
                                              int lane) {
  using C = PrepareConfig;
  const uint32_t first = smem + (lane >> 3 & 1) * kHalfTile +
                         Swizzled(warp * 8 + (lane >> 4), lane & 7);
  auto extend = [](uint4 x, uint4 y) -> uint4 {
    return {MulX2<Operand>(x.x, y.x), MulX2<Operand>(x.y, y.y), MulX2<Operand>(x.z, y.z),
            MulX2<Operand>(x.w, y.w)};
  };
#pragma unroll
  for (int i = 0; i < 8; i += 2) {
    const uint32_t at = InRow(first, i);
    const uint4 q = Lds128(at + C::kQ), k = Lds128(at + C::kK), k_down = Lds128(at + C::kKDown);
    Sts128(at + C::kQ, extend(q, before));
    Sts128(at + C::kK, extend(k, before));
    Sts128(at + C::kKDown, extend(k_down, after));
  }
}

// Aqk entry and L entry (i, j), i >= j, from the products q_i k_j and k_i k_j.
__device__ __forceinline__ uint32_t AqkAddress(uint32_t smem, int i, int j) {
  return smem + PrepareConfig::kAqk + Swizzled(i, j >> 3) + (j & 7) * 2;
}
__device__ __forceinline__ uint32_t LAddress(uint32_t smem, int i, int j) {
  return smem + PrepareConfig::kL + BlockOffset(i >> 4, j >> 4) + (i & 15) * kBlockRow +
         (j & 15) * 4;
}

// The smallest beta that can be divided out of a row of the inverse again: 0 is computed as this,
// for the gradient alone, where it is exact to 2^-40.
__device__ __forceinline__ float NotZero(float beta) {
  return fabsf(beta) < 0x1p-40f ? 0x1p-40f : beta;
}

// Products of octets `row` and `column`, as in BuildOctet -> Aqk, with zeros in the pair's place
// above the diagonal, and L = diag(beta) Akk for the inverse.
template <typename Operand, bool kGradient>
__device__ __forceinline__ void StoreProducts(const float (&c)[4], uint32_t smem, int row,
                                              int column, int lane) {
  const int i = row * 8 + (lane >> 2), j = column * 8 + (lane & 3) * 2;
  const float raw = LdsF32(smem + PrepareConfig::kBeta + i * 4);
  const float beta = kGradient ? NotZero(raw) : raw;
  if (row == column) {
    Sts32(AqkAddress(smem, i, j), Pack<Operand>(i >= j ? c[0] : 0.f, i > j ? c[1] : 0.f));
  } else {
    Sts32(AqkAddress(smem, i, j), Pack<Operand>(c[0], c[1]));
    Sts32(AqkAddress(smem, column * 8 + (lane >> 2), row * 8 + (lane & 3) * 2), 0);
  }
  StsF32x2(LAddress(smem, i, j), beta * c[2], beta * c[3]);
}

// The inverse in fp32 blocks -> A_inv, with beta in its columns, in their place; by four warps. A
// thread takes half a row.
template <typename Operand>
__device__ __forceinline__ void PackInverse(uint32_t smem, int tid) {
  using C = PrepareConfig;
  const int i = tid >> 1, first_piece = (tid & 1) * 4;
  uint4 packed[4];
#pragma unroll
  for (int u = 0; u < 4; ++u) {
    const int j = (first_piece + u) * 8;
    packed[u] = {0, 0, 0, 0};
    if (j >> 4 <= i >> 4) {
      const uint32_t x = LAddress(smem, i, j), beta = smem + C::kBeta + j * 4;
      const float4 x0 = LdsF32x4(x), x1 = LdsF32x4(x + 16), b0 = LdsF32x4(beta),
                   b1 = LdsF32x4(beta + 16);
      packed[u] = {Pack<Operand>(x0.x * b0.x, x0.y * b0.y), Pack<Operand>(x0.z * b0.z, x0.w * b0.w),
                   Pack<Operand>(x1.x * b1.x, x1.y * b1.y),
                   Pack<Operand>(x1.z * b1.z, x1.w * b1.w)};
    }
  }
  BarSync(1, 128);
#pragma unroll
  for (int u = 0; u < 4; ++u) Sts128(smem + C::kAInv + Swizzled(i, first_piece + u), packed[u]);
}

// The same for the gradient: strictly below the diagonal the inverse itself, in its place, and, for
// kErrors, in q's place the one with beta on the other side, which is similar to it.
template <typename Operand, bool kErrors>
__device__ __forceinline__ void PackStrictlyLower(uint32_t smem, int tid) {
  using C = PrepareConfig;
  const int i = tid >> 1, first_piece = (tid & 1) * 4;
  const float over_beta = kErrors ? Rcp(NotZero(LdsF32(smem + C::kBeta + i * 4))) : 1.f;
  uint4 packed[4];
#pragma unroll
  for (int u = 0; u < 4; ++u) {
    const int j = (first_piece + u) * 8;
    packed[u] = {0, 0, 0, 0};
    if (j >> 4 <= i >> 4) {
      float x[8];
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        x[n] = j + n < i ? LdsF32(LAddress(smem, i, j + n)) : 0.f;
        if (kErrors) x[n] *= NotZero(LdsF32(smem + C::kBeta + (j + n) * 4)) * over_beta;
      }
      packed[u] = {Pack<Operand>(x[0], x[1]), Pack<Operand>(x[2], x[3]), Pack<Operand>(x[4], x[5]),
                   Pack<Operand>(x[6], x[7])};
    }
  }
  if (!kErrors) BarSync(1, 128);
#pragma unroll
  for (int u = 0; u < 4; ++u) {
    Sts128(smem + (kErrors ? C::kQ : C::kAInv) + Swizzled(i, first_piece + u), packed[u]);
  }
}

// With q and k normalised every operand is at most 1 and fp16 holds it; as given they may be
// anything and take bf16.
template <bool kL2Norm, typename G, bool kGradient>
__global__ void __launch_bounds__(PrepareConfig::kThreads, sizeof(G) == 2 ? 3 : 2)
    ChunkFwdPrepareKernel(const __grid_constant__ CUtensorMap q_map,
                          const __grid_constant__ CUtensorMap k_map,
                          const __grid_constant__ FwdParams p,
                          const __grid_constant__ Workspace ws) {
  using C = PrepareConfig;
  using Operand = std::conditional_t<kL2Norm, Fp16, Bf16>;
  extern __shared__ __align__(1024) uint8_t shared[];
  const uint32_t smem = SharedAddress(shared);
  int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31;
  const uint32_t HV = static_cast<uint32_t>(p.HV), h = blockIdx.x,
                 slot = blockIdx.z * gridDim.y + blockIdx.y;
  GriddepcontrolLaunchDependents();  // the scan sets itself up while the last blocks work
  if (slot >= ws.NT) return;
  const ChunkSlot chunk = FindChunk(p, ws, slot);
  if (chunk.valid == 0) return;

  if (tid == 0) {
    const int qk_head = p.H == p.HV ? h : h / (HV / static_cast<uint32_t>(p.H));
    MbarrierInit(smem + C::kBarrier, 1);
    FenceMbarrierInit();
    MbarrierExpectTx(smem + C::kBarrier, 2 * kTile);
    TmaLoad(smem + C::kQ, &q_map, smem + C::kBarrier, qk_head, chunk.token, 0);
    TmaLoad(smem + C::kK, &k_map, smem + C::kBarrier, qk_head, chunk.token, 0);
  }
  Octet octet{chunk.valid - warp * 8, 1.f, 1.f};
  const int K = static_cast<int>(p.K);
  GatePair<G> g[2][8];  // this lane's two channels of each half of this warp's rows
  {
    const uint32_t stride = HV * static_cast<uint32_t>(p.K);
    const int second_half = K - 64;  // the first one again, if it is all
    const G* row =
        static_cast<const G*>(p.g) + (int64_t{chunk.token + warp * 8} * HV + h) * p.K + 2 * lane;
#pragma unroll
    for (int r = 0; r < 8; ++r, row += stride) {
      g[0][r] = g[1][r] = {};
      if (r < octet.left) {
        g[0][r] = *reinterpret_cast<const GatePair<G>*>(row);
        g[1][r] = *reinterpret_cast<const GatePair<G>*>(row + second_half);
      }
    }
  }
  // Loads are under way long before they are waited for.
  uint32_t beta_bits = 0;
  if (tid < chunk.valid) {
    const int64_t at = int64_t{chunk.token + tid} * HV + h;
    beta_bits = p.beta_dtype == DType::kF32 ? static_cast<const uint32_t*>(p.beta)[at]
                                            : static_cast<const uint16_t*>(p.beta)[at];
  }
  float2 bias[2] = {};
  if (p.dt_bias != nullptr) {
    const float* at = p.dt_bias + chunk.row * p.dt_bias_stride + h * K + 2 * lane;
    bias[0] = *reinterpret_cast<const float2*>(at);
    bias[1] = *reinterpret_cast<const float2*>(at + K - 64);
  }
  const float A_log = p.A_log == nullptr ? 0.f : p.A_log[chunk.row * p.A_log_stride + h];
  __syncthreads();
  GateParams gate{p.gate, kLog2E, -Ex2(kLog2E * A_log)};
  if (p.gate == Gate::kLowerBound) gate = {p.gate, kLog2E * gate.scale, p.lower_bound * kLog2E};
#pragma unroll
  for (float2& b : bias) b = {b.x * gate.slope, b.y * gate.slope};
  if (tid < kChunk) {
    float beta = __uint_as_float(p.beta_dtype == DType::kF32 ? beta_bits : beta_bits << 16);
    if (p.beta_mode != BetaMode::kProbability) beta = Rcp(1.f + Ex2(-kLog2E * beta));
    if (p.beta_mode == BetaMode::kTwoSigmoid) beta *= 2.f;
    StsF32(smem + C::kBeta + tid * 4, tid < chunk.valid ? beta : 0.f);
  }
  MbarrierWait(smem + C::kBarrier, 0);

  float own[4] = {};  // products of this warp's octet with itself
  {
    if (octet.left < 8) {  // another sequence's tokens, or none: they may hold NaN
      for (int r = max(octet.left, 0) + (lane >> 4); r < 8; r += 2) {
        const uint32_t at =
            smem + (lane >> 3 & 1) * kHalfTile + Swizzled(warp * 8 + r, lane & 7);
        Sts128(at + C::kQ, {0, 0, 0, 0});
        Sts128(at + C::kK, {0, 0, 0, 0});
      }
      __syncwarp();
    }
    if (kL2Norm) {
      RowNorms(octet, smem + (lane & 8 ? C::kK : C::kQ) +
                          Swizzled(warp * 8 + (lane & 7), lane >> 4), lane);
    }
    if (BuildOctet<Operand, kL2Norm>(own, smem, g, bias, gate, octet, warp, lane)) {
      StrongOctet<Operand, kL2Norm, G>(own, smem, p, chunk, gate, octet, h, warp, lane);
    }
  }
  const float k_norm = __shfl_sync(~0u, octet.k_norm, lane * 4);  // of row lane % 8
  __syncthreads();

  if (tid < kHead) {
    float sum = 0.f;
#pragma unroll
    for (int o = 0; o < 8; ++o) sum += LdsF32(smem + C::kLogDecays + (o * kHead + tid) * 4);
    StsF32(smem + C::kDecay + tid * 4, Ex2(sum));
  }
  if (kL2Norm) {
    const float beta = LdsF32(smem + C::kBeta + (warp * 8 + (lane & 7)) * 4);
    const uint32_t writes = __ballot_sync(~0u, beta != 0.f && k_norm != 0.f);
    if (lane == 0) Sts8(smem + C::kWrites + warp, writes);
  }
  const uint32_t factors = smem + C::kOwn + warp * C::kOwnBytes;
  BuildFactors<Operand>(smem, warp, lane);
  __syncwarp();
  float c[4][4] = {}, helped_c[3][4] = {};
  const OctetPairs mine = OwnPairs(warp), helped = HelpedPairs(warp);
  PairProducts<Operand, 4>(c, smem, factors, mine, lane);
  PairProducts<Operand, 3>(helped_c, smem, factors + mine.count * C::kFactorRow, helped, lane);
  tid = Opaque(tid), warp = tid >> 5, lane = tid & 31;
  const uint4 before = Lds128(factors + 4 * C::kFactorRow + (lane & 15) * 16),
              after = Lds128(factors + 5 * C::kFactorRow + (lane & 15) * 16);
  __syncthreads();

  ExtendToChunk<Operand>(smem, before, after, warp, lane);
  StoreProducts<Operand, kGradient>(own, smem, warp, warp, lane);
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    if (n < mine.count) {
      StoreProducts<Operand, kGradient>(c[n], smem, mine.row, mine.first - n, lane);
    }
  }
#pragma unroll
  for (int n = 0; n < 3; ++n) {
    if (n < helped.count) {
      StoreProducts<Operand, kGradient>(helped_c[n], smem, helped.row, helped.first - n, lane);
    }
  }
  FenceProxyAsync();
  __syncthreads();
  std::byte* image =
      ws.images + (int64_t{slot} * HV + h) * (kGradient ? image::kGradientBytes : image::kBytes);
  if (tid == 128) {
    BulkStore(image, smem + C::kQ, 3 * kTile);
    BulkStore(image + image::kAqk, smem + C::kAqk, kMatrix);
    BulkStore(image + image::kDecay, smem + C::kDecay, image::kDecayBytes);
    if (kGradient) BulkStore(image + image::kBeta, smem + C::kBeta, image::kBetaBytes);
    BulkCommit();
    BulkWaitRead();
  }
  if (!kGradient && warp >= 4) return;

  if (warp < 4) InvertUnitLower(smem + C::kL, smem + C::kScratch, warp, lane);
  if constexpr (kGradient) {
    __syncthreads();  // q has left
    if (warp >= 4) return;
    PackStrictlyLower<Operand, true>(smem, tid);
    PackStrictlyLower<Operand, false>(smem, tid);
  } else {
    PackInverse<Operand>(smem, tid);
  }
  FenceProxyAsync();
  BarSync(1, 128);
  if (tid == 0) {
    BulkStore(image + image::kAInv, smem + C::kAInv, kMatrix);
    if (kGradient) BulkStore(image + image::kEInv, smem + C::kQ, kMatrix);
    BulkCommit();
    BulkWaitRead();
  }
}

}  // namespace jax_kda::sm90
