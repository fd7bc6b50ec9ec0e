// Build: q, k, g and beta of one chunk and value head in shared memory -> all that the scan needs
// of them, by eight warps.
//
// Warp w owns the octet of tokens 8 w to 8 w + 7. With c_i the sum of its log decays up to token i
// and c_7 the whole, an octet's operands are
//
//   q_up_i = q_i exp(c_i)    k_up_i = k_i exp(c_i)    k_down_j = k_j exp(c_7 - c_j)
//
// A pair of tokens i > j of neighbouring octets is q_up_i k_down_j, all factors at most 1: tensor
// cores. Then both octets are decayed by one another, rows of the later one (up) from the start of
// the 16 tokens, rows of the earlier one (down) to their end; pairs between 16 and 16 tokens are
// the next products, and so on to 32 and 32, and to what the scan wants: decay from the chunk's
// start or to its end. q and k stay in registers from load to store, stacked as the left operand of
// these products, 8 rows of each a warp; k_down is in shared memory, where all of them read it.
//
// Within an octet a pair is  (q_i exp(c_i)) (k_j exp(-c_j))  in TF32, which has the range for it
// while c_7 >= -64 in base 2. Gates beyond that are no special case of the result, only of the
// work: from the first token on where some channel's sum is below -64, rows are computed pair by
// pair from products of exp(g) <= 1 (StrongOctet). So any gate works, underflow to 0 is the right
// answer, -inf is a reset, and no token's bits depend on a later one.
//
// Registers are short throughout: 80 a thread. Where lane or warp pass through Opaque, addresses
// are computed anew instead of held.
#pragma once

#include <type_traits>

#include "chunk_fwd_sm90.cuh"
#include "unit_lower_inverse_sm90.cuh"

namespace jax_kda::sm90 {

inline constexpr float kLog2E = 1.4426950408889634f;

// Shared memory of a build: addresses, and the places in what they point to.
struct BuildMemory {
  uint32_t tiles;  // q, k and bf16 g as loaded; then q_decayed, k_decayed, k_restored
  uint32_t own;    // [8 warps, kOwnBytes] sums, then decays; then the blocks of I + L, its inverse
  uint32_t aqk;    // Aqk; until the products are stored, octet decays and their logs
  uint32_t decay;  // [K] fp32, the gate's bias, then the chunk's decay; 64 bits: which tokens write
  uint32_t beta;   // [64] fp32

  static constexpr int kQ = 0, kK = kTile, kKDown = 2 * kTile, kG = kKDown;
  static constexpr int kSumRow = 64 * 4 + 32;  // 64 channels; the 32 put rows on different banks
  static constexpr int kOwnBytes = 8 * kSumRow;
  // L in ten blocks, and scratch: for the inverse four blocks or, while it is made of both halves,
  // the last decays of all octets, a block for each half, and what its warps keep there.
  static constexpr int kScratch = 10 * kBlock, kLBytes = kScratch + 4 * kBlock;
  static constexpr int kHalfScratch = kScratch + 8 * kHead * 2, kKept = kHalfScratch + 2 * kBlock;
  static constexpr int kLogDecays = 8 * kHead * 4;  // behind the octet decays [8, K]
  static_assert(2 * kLogDecays == kMatrix && kLBytes <= 8 * kOwnBytes);
  static_assert(kKept + 64 * 8 <= kLBytes);
};
inline constexpr int kBuildThreads = 256;

// Named barriers: of all eight warps, and of each four.
inline constexpr int kAllBarrier = 1, kQuadBarrier = 2;

// Below this sum of log decays, base 2, an octet's products leave TF32's range.
inline constexpr float kStrong = -64.f;

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
// log2(1 + 2^y). lg2.approx has an absolute error, so small 2^y take the series; large ones are y
// itself.
__device__ __forceinline__ float Softplus2(float y) {
  const float z = Ex2(fminf(y, 120.f)), log = Lg2(1.f + z);
  const float series = z * kLog2E * (1.f - z * (0.5f - z * (1.f / 3 - z * (0.25f - z * 0.2f))));
  return Select(z < 0.0625f, series, fmaxf(y, log));
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
  int left;              // tokens of the sequence from its first one on: rows beyond are not ours
  float q_norm, k_norm;  // 1 / norm of row lane / 4, 0 of a row of zeros; 1 if not normalised
};

// Where this lane addresses fragments of an octet's q and k, stacked: matrices of q's and k's
// channels 0-7, then 8-15, of 16. Accumulators 0, 1 are then of q's row lane / 4, 2, 3 of k's.
__device__ __forceinline__ uint32_t StackedFragment(uint32_t tiles, int octet, int lane) {
  return tiles + (lane & 8 ? BuildMemory::kK : BuildMemory::kQ) +
         Swizzled(octet * 8 + (lane & 7), lane >> 4);
}
// The same of k_down, as it is stored: pieces 0-3 of 8 channels.
__device__ __forceinline__ uint32_t DownFragment(uint32_t tiles, int octet, int lane) {
  return tiles + BuildMemory::kKDown + Swizzled(octet * 8 + (lane & 7), lane >> 3);
}

// Zeros in the rows of q and k that are not ours, which may hold NaN.
__device__ __forceinline__ void ClearRows(uint32_t tiles, int left, int warp, int lane) {
  if (left >= 8) return;
  for (int r = max(left, 0) + (lane >> 4); r < 8; r += 2) {
    const uint32_t at = tiles + (lane >> 3 & 1) * kHalfTile + Swizzled(warp * 8 + r, lane & 7);
    Sts128(at + BuildMemory::kQ, {0, 0, 0, 0});
    Sts128(at + BuildMemory::kK, {0, 0, 0, 0});
  }
  __syncwarp();
}

// An octet's q and k as the stacked left operand of all 128 channels.
using Stacked = uint32_t[kHead / 16][4];
__device__ __forceinline__ void LoadStacked(Stacked& x, uint32_t fragment) {
#pragma unroll
  for (int step = 0; step < kHead / 16; ++step) {
    Ldmatrix(x[step], (fragment ^ (step & 3) << 5) + (step >> 2) * kHalfTile);
  }
}
__device__ __forceinline__ void StoreStacked(const Stacked& x, uint32_t fragment) {
#pragma unroll
  for (int step = 0; step < kHead / 16; ++step) {
    Stmatrix((fragment ^ (step & 3) << 5) + (step >> 2) * kHalfTile, x[step][0], x[step][1],
             x[step][2], x[step][3]);
  }
}

// Norms by tensor cores: the diagonal of x x^T, whose right operand is the left's registers.
__device__ __forceinline__ void RowNorms(Octet& octet, const Stacked& x, int lane) {
  float q[4] = {}, k[4] = {};
#pragma unroll
  for (int step = 0; step < kHead / 16; ++step) {
    Mma<Bf16>(q, x[step], x[step][0], x[step][2]);
    Mma<Bf16>(k, x[step], x[step][1], x[step][3]);
  }
  const int row = lane >> 2, diagonal = (lane & ~3) | row >> 1;
  const float q2 = __shfl_sync(~0u, row & 1 ? q[1] : q[0], diagonal),
              k2 = __shfl_sync(~0u, row & 1 ? k[3] : k[2], diagonal);
  octet.q_norm = q2 == 0.f ? 0.f : Rsqrt(q2 + 1e-6f);
  octet.k_norm = k2 == 0.f ? 0.f : Rsqrt(k2 + 1e-6f);
}

// A bit per token of the octet: whether it writes.
__device__ __forceinline__ void StoreWrites(const BuildMemory& m, const Octet& octet, int warp,
                                            int lane) {
  const float norm = __shfl_sync(~0u, octet.k_norm, lane * 4);  // of row lane % 8
  const float beta = LdsF32(m.beta + (warp * 8 + (lane & 7)) * 4);
  const uint32_t writes = __ballot_sync(~0u, beta != 0.f && norm != 0.f);
  if (lane == 0) Sts8(m.decay + kHead * 4 + warp, writes);
}

// This warp's octet: q_up and k_up in place of q and k, k_down in place of g, its decays, and the
// products of its own pairs: c 0, 1 are q_i k_j of row i = lane / 4 and columns j = 2 (lane % 4)
// and the next, c 2, 3 are k_i k_j. Whether some channel is stronger than TF32 can take. The decays
// are summed with a lane two channels of all rows, and go to the fragments through shared memory,
// half of the channels at a time. fp32 g comes in registers: this lane's two channels of each half.
template <typename Operand, bool kL2Norm, typename G>
__device__ __forceinline__ bool BuildOctet(float (&c)[4], Stacked& stacked, const BuildMemory& m,
                                           const GatePair<G> (&g)[2][8], const GateParams& gate,
                                           const Octet& octet, int warp, int lane) {
  using M = BuildMemory;
  bool strong = false;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    lane = Opaque(lane);  // addresses anew: registers are short
    const int t = lane & 3;
    const uint32_t own = m.own + warp * M::kOwnBytes;
    const uint32_t decays = m.aqk + warp * kHead * 4 + half * 256;
    {
      const float scale = gate.gate == Gate::kActivated ? 1.f : gate.scale;
      float2 sum = {0.f, 0.f};
      __syncwarp();
#pragma unroll
      for (int first = 0; first < 8; first += 4) {  // all eight at once would spill
        float2 x[4];
        if constexpr (sizeof(G) == 2) {
          const uint32_t column =
              m.tiles + M::kG + half * kHalfTile + warp * 1024 + ((lane >> 2) << 4) + t * 4;
#pragma unroll
          for (int i = 0; i < 4; ++i) x[i] = GatePair<G>{Lds32(InRow(column, first + i))}.Floats();
        } else {
#pragma unroll
          for (int i = 0; i < 4; ++i) x[i] = g[half][first + i].Floats();
        }
        GateDecays(x, gate, LdsF32x2(m.decay + half * 256 + lane * 8));
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (first + i < octet.left) {
            sum = {fmaf(x[i].x, scale, sum.x), fmaf(x[i].y, scale, sum.y)};
          }
          StsF32x2(own + (first + i) * M::kSumRow + lane * 8, sum.x, sum.y);
        }
      }
      if (__any_sync(~0u, fminf(sum.x, sum.y) < kStrong)) strong = true;
      const uint32_t at = decays + lane * 8;
      StsF32x2(at, Ex2(sum.x), Ex2(sum.y));
      StsF32x2(at + M::kLogDecays, sum.x, sum.y);
      __syncwarp();
    }
    const uint32_t sums = own + (lane >> 2) * M::kSumRow + t * 8;
    const uint32_t down = DownFragment(m.tiles, warp, lane) + half * kHalfTile;
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {  // of steps of 16 channels
      uint32_t k_down[4];
#pragma unroll
      for (int u = 0; u < 2; ++u) {
        const int step = 2 * pair + u;
        uint32_t (&x)[4] = stacked[half * 4 + step];
#pragma unroll
        for (int i = 0; i < 2; ++i) {  // channels 2 t and 2 t + 1, then 2 t + 8 and 2 t + 9
          const float2 sum = LdsF32x2(sums + step * 64 + i * 32);
          const float2 total = LdsF32x2(decays + t * 8 + step * 64 + i * 32);
          float2 q = {Bf16Lo(x[2 * i]), Bf16Hi(x[2 * i])},
                 k = {Bf16Lo(x[2 * i + 1]), Bf16Hi(x[2 * i + 1])};
          if (kL2Norm) {
            q = {q.x * octet.q_norm, q.y * octet.q_norm};
            k = {k.x * octet.k_norm, k.y * octet.k_norm};
          }
          const float2 up = {Ex2(sum.x), Ex2(sum.y)};
          const float2 right = {k.x * Ex2(-sum.x), k.y * Ex2(-sum.y)};
          q = {q.x * up.x, q.y * up.y};
          k = {k.x * up.x, k.y * up.y};
          const uint32_t a[4] = {RoundTf32(q.x), RoundTf32(k.x), RoundTf32(q.y), RoundTf32(k.y)};
          MmaTf32(c, a, RoundTf32(right.x), RoundTf32(right.y));
          x[2 * i] = Pack<Operand>(q.x, q.y);
          x[2 * i + 1] = Pack<Operand>(k.x, k.y);
          k_down[2 * u + i] = Pack<Operand>(right.x * total.x, right.y * total.y);
        }
      }
      Stmatrix(down ^ pair << 6, k_down[0], k_down[1], k_down[2], k_down[3]);
    }
  }
  return strong;
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

// An octet whose decays leave TF32's range, from the inputs in global memory: k_down anew, and the
// rows of c from the first on that has such a decay. Every decay is a product of exp(g) <= 1. Slow:
// some hundred instructions a pair of tokens. A lane takes four channels.
template <typename Operand, bool kL2Norm, typename G>
__device__ __forceinline__ void StrongOctet(float (&c)[4], const BuildMemory& m, const FwdParams& p,
                                            const ChunkSlot& chunk, const GateParams& gate,
                                            const Octet& octet, int h, int warp, int lane) {
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
    const uint32_t at = m.tiles + BuildMemory::kKDown + (lane >> 4) * kHalfTile +
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
    const bool strong = fminf(fminf(sum.x, sum.y), fminf(sum.z, sum.w)) < kStrong;
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

// Products of an octet with an earlier one or itself as they are kept: this lane's two of q_i k_j,
// as operands, and of k_i k_j; i is row lane / 4.
struct Products {
  uint32_t qk;
  float kk[2];
};
template <typename Operand>
__device__ __forceinline__ Products Keep(const float (&c)[4]) {
  return {Pack<Operand>(c[0], c[1]), {c[2], c[3]}};
}
// Products of a warp's stacked rows with octet `column` of k_down.
template <typename Operand>
__device__ __forceinline__ Products StackedProducts(const Stacked& x, uint32_t tiles, int column,
                                                    int lane) {
  const uint32_t right = DownFragment(tiles, column, lane);
  float c[4] = {};
#pragma unroll
  for (int step = 0; step < kHead / 16; step += 2) {
    uint32_t b[4];
    Ldmatrix(b, (right ^ (step & 2) << 5) + (step >> 2) * kHalfTile);
    Mma<Operand>(c, x[step], b[0], b[1]);
    Mma<Operand>(c, x[step + 1], b[2], b[3]);
  }
  return Keep<Operand>(c);
}

// The decay of `count` octets from `first` on, as operands, to memory of this warp's own. A lane
// takes four channels. kStacked: what a lane of a fragment wants of 32 channels lies side by side,
// 2 t, 2 t + 1 and the same 8, 16, 24 further on; else channels are in order.
template <typename Operand, bool kStacked>
__device__ __forceinline__ void StoreDecays(const BuildMemory& m, uint32_t own, int first,
                                            int count, int lane) {
  const uint32_t at = m.aqk + first * kHead * 4 + lane * 16;
  float4 x = LdsF32x4(at);
#pragma unroll
  for (int o = 1; o < count; ++o) {
    const float4 y = LdsF32x4(at + o * kHead * 4);
    x = {x.x * y.x, x.y * y.y, x.z * y.z, x.w * y.w};
  }
  const uint32_t low = Pack<Operand>(x.x, x.y), high = Pack<Operand>(x.z, x.w);
  if (kStacked) {
    const uint32_t to = own + (lane >> 3) * 64 + (lane & 1) * 32 + (lane >> 1 & 3) * 4;
    Sts32(to, low);
    Sts32(to + 16, high);
  } else {
    Sts64(own + lane * 8, low, high);
  }
  __syncwarp();
}
// q and k times such decays.
template <typename Operand>
__device__ __forceinline__ void ScaleStacked(Stacked& x, uint32_t own, int lane) {
  const uint32_t at = own + (lane & 3) * 16;
#pragma unroll
  for (int step = 0; step < kHead / 16; step += 2) {
    const uint4 f = Lds128(at + step * 32);
    const uint32_t factors[2][2] = {{f.x, f.y}, {f.z, f.w}};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      uint32_t& pair = x[step + (i >> 2)][i & 3];
      pair = MulX2<Operand>(pair, factors[i >> 2][i >> 1 & 1]);
    }
  }
}
// k_down of this warp's octet, in place. A lane takes 8 channels, of `f`, in every other row.
__device__ __forceinline__ uint4 LoadDecays(uint32_t own, int lane) {
  return Lds128(own + (lane & 15) * 16);
}
template <typename Operand>
__device__ __forceinline__ void ScaleDown(const BuildMemory& m, uint4 f, int warp, int lane) {
  const uint32_t first = m.tiles + BuildMemory::kKDown + (lane >> 3 & 1) * kHalfTile +
                         Swizzled(warp * 8 + (lane >> 4), lane & 7);
#pragma unroll
  for (int i = 0; i < 8; i += 4) {
    const uint32_t at[2] = {InRow(first, i), InRow(first, i + 2)};
    const uint4 x[2] = {Lds128(at[0]), Lds128(at[1])};
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      Sts128(at[n], {MulX2<Operand>(x[n].x, f.x), MulX2<Operand>(x[n].y, f.y),
                     MulX2<Operand>(x[n].z, f.z), MulX2<Operand>(x[n].w, f.w)});
    }
  }
}
// Octet `warp` decayed by `count` octets of its four from `first` on: q and k if it is later than
// those, else k_down, once the four warps have read it.
template <typename Operand>
__device__ __forceinline__ void Decay(Stacked& x, const BuildMemory& m, bool later, int first,
                                      int count, int warp, int lane) {
  const uint32_t own = m.own + warp * BuildMemory::kOwnBytes;
  if (later) {
    StoreDecays<Operand, true>(m, own, first, count, lane);
  } else {
    StoreDecays<Operand, false>(m, own, first, count, lane);
  }
  BarSync(kQuadBarrier + (warp >> 2), 128);
  if (later) {
    ScaleStacked<Operand>(x, own, lane);
  } else {
    ScaleDown<Operand>(m, LoadDecays(own, lane), warp, lane);
  }
}

// Where entry (i, j) of Aqk and of L is, i >= j: of the products q_i k_j and k_i k_j. Aqk is a
// triangle or, for the gradient, a whole matrix.
template <bool kGradient>
__device__ __forceinline__ uint32_t AqkAddress(const BuildMemory& m, int i, int j) {
  return m.aqk + (kGradient ? Swizzled(i, j >> 3) : triangle::Place(i, j >> 3)) + (j & 7) * 2;
}
__device__ __forceinline__ uint32_t LAddress(const BuildMemory& m, int i, int j) {
  return m.own + BlockOffset(i >> 4, j >> 4) + (i & 15) * kBlockRow + (j & 15) * 4;
}

// The smallest beta that can be divided out of a row of the inverse again: 0 is computed as this,
// for the gradient alone, where it is exact to 2^-40.
__device__ __forceinline__ float NotZero(float beta) {
  return fabsf(beta) < 0x1p-40f ? 0x1p-40f : beta;
}

// Products of octets `row` and `column` -> L = diag(beta) Akk, and Aqk, with zeros in the pair's
// place above the diagonal.
template <bool kGradient>
__device__ __forceinline__ void StoreL(const BuildMemory& m, const Products& products, int row,
                                       int column, int lane) {
  const int i = row * 8 + (lane >> 2), j = column * 8 + (lane & 3) * 2;
  const float raw = LdsF32(m.beta + i * 4), beta = kGradient ? NotZero(raw) : raw;
  StsF32x2(LAddress(m, i, j), beta * products.kk[0], beta * products.kk[1]);
}
template <bool kGradient>
__device__ __forceinline__ void StoreAqk(const BuildMemory& m, uint32_t qk, int row, int column,
                                         int lane) {
  const int g = lane >> 2, t = lane & 3;
  if (row == column) {
    qk = g >= 2 * t + 1 ? qk : g == 2 * t ? qk & 0xffffu : 0u;
  } else if (kGradient || row >> 1 == column >> 1) {  // else the triangle has no such place
    Sts32(AqkAddress<kGradient>(m, column * 8 + g, row * 8 + t * 2), 0);
  }
  Sts32(AqkAddress<kGradient>(m, row * 8 + g, column * 8 + t * 2), qk);
}

// From the octets to the operands of the chunk, Aqk, and L, of which both halves of 32 tokens are
// inverted already, in shared memory: a fence and a barrier have still to follow.
template <typename Operand, bool kGradient>
__device__ __forceinline__ void BuildProducts(const BuildMemory& m, Stacked& x, Products within,
                                              int warp, int lane) {
  const int quad = warp >> 2, octet = warp & 3;  // of the quad
  Products c8 = {}, c16[2] = {};  // with octets 8 and 16 tokens before, of half the warps
  BarSync(kQuadBarrier + quad, 128);
  if (octet & 1) c8 = StackedProducts<Operand>(x, m.tiles, warp - 1, lane);
  Decay<Operand>(x, m, octet & 1, warp ^ 1, 1, warp, lane);
  BarSync(kQuadBarrier + quad, 128);
  if (octet >= 2) {
#pragma unroll
    for (int n = 0; n < 2; ++n) c16[n] = StackedProducts<Operand>(x, m.tiles, 4 * quad + n, lane);
  }
  Decay<Operand>(x, m, octet >= 2, 4 * quad + (octet >= 2 ? 0 : 2), 2, warp, lane);
  BarSync(kAllBarrier, kBuildThreads);
  lane = Opaque(lane), warp = Opaque(warp);
  // Own memory is L's from here on, but for its scratch, where the last decays go.
  StoreL<kGradient>(m, within, warp, warp, lane);
  if (octet & 1) StoreL<kGradient>(m, c8, warp, warp - 1, lane);
  if (octet >= 2) {
#pragma unroll
    for (int n = 0; n < 2; ++n) StoreL<kGradient>(m, c16[n], warp, 4 * quad + n, lane);
  }
  BarSync(kAllBarrier, kBuildThreads);  // L is inverted within 32 tokens
  const uint32_t scratch = m.own + BuildMemory::kScratch + warp * kHead * 2;
  uint32_t qk32[4] = {};
  if (quad == 1) {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const Products products = StackedProducts<Operand>(x, m.tiles, n, lane);
      qk32[n] = products.qk;
      StoreL<kGradient>(m, products, warp, n, lane);
    }
    StoreDecays<Operand, true>(m, scratch, 0, 4, lane);
    ScaleStacked<Operand>(x, scratch, lane);
    StoreStacked(x, StackedFragment(m.tiles, warp, lane));
  } else {
    StoreStacked(x, StackedFragment(m.tiles, warp, lane));
    const int channel = warp * 32 + lane;
    float sum = 0.f;
#pragma unroll
    for (int o = 0; o < 8; ++o) {
      sum += LdsF32(m.aqk + BuildMemory::kLogDecays + (o * kHead + channel) * 4);
    }
    StsF32(m.decay + channel * 4, Ex2(sum));
    StoreDecays<Operand, false>(m, scratch, 4, 4, lane);
    if (warp < 2) {  // while the other quad has products to do; registers are short meanwhile
      const uint32_t kept = m.own + BuildMemory::kKept + (warp * 32 + lane) * 8;
      Sts64(kept, within.qk, c8.qk);
      InvertHalf(m.own, m.own + BuildMemory::kHalfScratch + warp * kBlock, warp, lane);
      const uint2 qk = Lds64(kept);
      within.qk = qk.x, c8.qk = qk.y;
      c16[0].qk = c16[1].qk = 0;  // it has none
    }
  }
  BarSync(kAllBarrier, kBuildThreads);  // Aqk takes the place of the octets' decays
  lane = Opaque(lane);
  if (quad == 0) ScaleDown<Operand>(m, LoadDecays(scratch, lane), warp, lane);
  StoreAqk<kGradient>(m, within.qk, warp, warp, lane);
  if (octet & 1) StoreAqk<kGradient>(m, c8.qk, warp, warp - 1, lane);
  if (octet >= 2) {
#pragma unroll
    for (int n = 0; n < 2; ++n) StoreAqk<kGradient>(m, c16[n].qk, warp, 4 * quad + n, lane);
  }
  if (quad == 1) {
#pragma unroll
    for (int n = 0; n < 4; ++n) StoreAqk<kGradient>(m, qk32[n], warp, n, lane);
  }
}

// The inverse in fp32 blocks -> the triangle A_inv, with beta in its columns, by four warps. A
// thread takes half a row. `a_inv` may be the blocks' own place.
template <typename Operand>
__device__ __forceinline__ void PackInverse(const BuildMemory& m, uint32_t a_inv, int tid) {
  const int i = tid & 63, first_piece = (tid >> 6) * 4;
  uint4 packed[4];
#pragma unroll
  for (int u = 0; u < 4; ++u) {
    const int j = (first_piece + u) * 8;
    if (j >> 4 <= i >> 4) {
      const uint32_t x = LAddress(m, i, j), beta = m.beta + j * 4;
      const float4 x0 = LdsF32x4(x), x1 = LdsF32x4(x + 16), b0 = LdsF32x4(beta),
                   b1 = LdsF32x4(beta + 16);
      packed[u] = {Pack<Operand>(x0.x * b0.x, x0.y * b0.y), Pack<Operand>(x0.z * b0.z, x0.w * b0.w),
                   Pack<Operand>(x1.x * b1.x, x1.y * b1.y),
                   Pack<Operand>(x1.z * b1.z, x1.w * b1.w)};
    }
  }
  BarSync(kQuadBarrier, 128);
#pragma unroll
  for (int u = 0; u < 4; ++u) {
    const int piece = first_piece + u;
    if (piece >> 1 <= i >> 4) Sts128(a_inv + triangle::Place(i, piece), packed[u]);
  }
}

}  // namespace jax_kda::sm90
