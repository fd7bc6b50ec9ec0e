// Prepare: q, k, g, beta of one chunk and value head -> its image (chunk_fwd_sm90.cuh).
//
// Decays are products of a_i = exp(g_i) <= 1, never exp of a positive number, so any gate works:
// underflow to 0 is the right answer, -inf is a reset. Operands are decayed over their own quad of
// 4 rows first (s: the quad's first row, e: its last),
//
//   q_up_i = q_i a_s .. a_i      k_up_i = k_i a_s .. a_i      k_down_j = k_j a_j+1 .. a_e
//
// and a pair of rows i > j of different quads is  q_up_i (decay between the quads) k_down_j: tensor
// cores, with the decay between, a factor per quad and channel, multiplied onto the fragments.
// Pairs within a quad are summed in fp32 while the quad is in registers. What the scan wants, the
// decay from the chunk's start or to its end, is one more factor per quad and channel.
//
// Grid: x = value head, y and z = chunk slot. Block: 8 warps; when building, warp w owns rows 8 w
// to 8 w + 7 (two quads) and a lane 2 channels of each half, so all decays live in one lane. Three
// blocks share an SM: 76,576 bytes, 80 registers a thread.
#pragma once

#include <type_traits>

#include "chunk_fwd_sm90.cuh"
#include "unit_lower_inverse_sm90.cuh"

namespace jax_kda::sm90 {

inline constexpr float kLog2E = 1.4426950408889634f;

struct PrepareConfig {
  static constexpr int kThreads = 256;
  static constexpr int kSub = 16;       // rows of a sub-block
  static constexpr int kQuadSums = 16;  // products within a quad: 10 of q (i >= j), 6 of k (i > j)
  // Bytes of a row of factors; the 32 put the rows of two quads on different banks.
  static constexpr int kFactorRow = kHead * 2 + 32;
  // Rows of factors: 1, `before` of quads 1-3 of sub-blocks 1-3, decay from each earlier quad to
  // sub-blocks 1-3, totals of quads 1 and 2 of every sub-block.
  static constexpr int kOne = 0, kBefore = 1, kAcross = kBefore + 9, kTotals = kAcross + 24,
                       kFactorRows = kTotals + 8;

  // Shared memory, bytes. Lifetimes: factors, then the blocks of I + L, of its inverse, and A_inv;
  // quad totals, then Aqk; quad sums, then scratch of the inverse; the gate's bias, then the
  // chunk's decay.
  static constexpr int kQ = 0, kK = kTile, kKDown = 2 * kTile;
  static constexpr int kL = 3 * kTile, kFactors = kL, kAInv = kL;
  static constexpr int kQuadTotals = kL + 10 * kBlock;          // [16, K] fp32
  static constexpr int kAqk = kQuadTotals;                      // [64, 64]
  static constexpr int kScratch = kAqk + kMatrix;               // [4] blocks
  static constexpr int kSums = kScratch;                        // [16 quads, 16] fp32
  static constexpr int kLogDecay = kSums + 16 * kQuadSums * 4;  // [8, K] fp32, log2, of 8 rows
  static constexpr int kBeyond = kLogDecay;  // [8, K / 2] two pairs: decay before, after 8 rows
  static constexpr int kDecay = kScratch + 4 * kBlock, kGateBias = kDecay;  // [K] fp32
  static constexpr int kWrites = kDecay + kHead * 4;  // behind the decay, as in the image
  static constexpr int kQNorm = kWrites + 16, kKNorm = kQNorm + kChunk * 4,
                       kBeta = kKNorm + kChunk * 4;
  static constexpr int kBarrier = kBeta + kChunk * 4;
  static constexpr int kBytes = kBarrier + 16;
  static_assert(kFactorRows * kFactorRow <= 10 * kBlock);
  static_assert(kLogDecay + 8 * kHead * 4 <= kScratch + 4 * kBlock);
  static_assert(16 * kHead * 4 == kMatrix);
  static_assert(3 * (kBytes + 1024) <= 228 * 1024,
                "three blocks an SM, each with 1 KB of the system's");
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

// Log decays, base 2, of a quad and this lane's channels of one half.
template <typename G>
__device__ __forceinline__ void QuadDecays(float2 (&log2_a)[4], const GatePair<G> (&g)[4],
                                           const GateParams& p, float2 bias) {
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    const float2 x = g[r].Floats();
    log2_a[r] = {fmaf(x.x, p.slope, bias.x), fmaf(x.y, p.slope, bias.y)};
  }
  // Uniform, and around the loops, so that the elements of a quad overlap.
  if (p.gate == Gate::kSoftplus) {
#pragma unroll
    for (float2& y : log2_a) y = {p.scale * Softplus2(y.x), p.scale * Softplus2(y.y)};
  } else if (p.gate == Gate::kLowerBound) {
#pragma unroll
    for (float2& y : log2_a) y = {p.scale * Rcp(1.f + Ex2(y.x)), p.scale * Rcp(1.f + Ex2(y.y))};
  }
}

// One step of a butterfly sum over the warp: 2 kKeep values become kKeep, the upper ones on lanes
// with bit 2 kKeep.
template <int kKeep>
__device__ __forceinline__ void HalveSums(float (&s)[16], int lane) {
  const bool upper = lane & (2 * kKeep);
#pragma unroll
  for (int i = 0; i < kKeep; ++i) {
    const float low = s[i], high = s[i + kKeep];
    s[i] = (upper ? high : low) + __shfl_xor_sync(~0u, upper ? low : high, 2 * kKeep);
  }
}
// Sums 16 values over the warp; lane l ends with the sum of value l / 2.
__device__ __forceinline__ float WarpSum16(float (&s)[16], int lane) {
  HalveSums<8>(s, lane);
  HalveSums<4>(s, lane);
  HalveSums<2>(s, lane);
  HalveSums<1>(s, lane);
  return s[0] + __shfl_xor_sync(~0u, s[0], 1);
}

// 1 / norm, 0 of a row of zeros, of 16 rows of q (warps 0-3) or k (warps 4-7): the diagonal of x
// x^T, whose right operand is the left's registers.
__device__ __forceinline__ void RowNorms(uint32_t smem, int warp, int lane) {
  using C = PrepareConfig;
  const uint32_t tile = smem + (warp < 4 ? C::kQ : C::kK);
  const int first = (warp & 3) * C::kSub, g = lane >> 2, t = lane & 3;
  float low[4] = {}, high[4] = {};  // rows 0-15 times rows 0-7 and 8-15
#pragma unroll
  for (int step = 0; step < kHead / 16; ++step) {
    uint32_t x[4];
    Ldmatrix(x, tile + (step >> 2) * kHalfTile +
                    Swizzled(first + (lane & 15), (step & 3) * 2 + (lane >> 4)));
    Mma<Bf16>(low, x, x[0], x[2]);
    Mma<Bf16>(high, x, x[1], x[3]);
  }
  if (t == g >> 1) {  // accumulators 0, 1 are row g, 2, 3 row g + 8, at columns 2 t and 2 t + 1
    const uint32_t norms = smem + (warp < 4 ? C::kQNorm : C::kKNorm) + (first + g) * 4;
    const float x = g & 1 ? low[1] : low[0], y = g & 1 ? high[3] : high[2];
    StsF32(norms, x == 0.f ? 0.f : Rsqrt(x + 1e-6f));
    StsF32(norms + 32, y == 0.f ? 0.f : Rsqrt(y + 1e-6f));
  }
}

// This warp's two quads: q_up, k_up, k_down in place of q and k, quad totals, products within
// quads.
template <typename Operand, bool kL2Norm, typename G>
__device__ __forceinline__ void BuildQuads(uint32_t smem, const GatePair<G> (&all_g)[2][2][4],
                                           const GateParams& gate, int valid, int warp, int lane) {
  using C = PrepareConfig;
  const int rows_left = valid - warp * 8;
  const uint32_t rows = smem + warp * 8 * 128 + lane * 4;
  GatePair<G> g[2][4];  // of this quad
#pragma unroll
  for (int i = 0; i < 8; ++i) g[i >> 2][i & 3] = all_g[0][i >> 2][i & 3];
#pragma unroll 1  // straight code would miss the instruction cache
  for (int quad = 0; quad < 2; ++quad) {
    float sums[C::kQuadSums] = {};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t column = InRow(rows, quad * 4) + half * kHalfTile;
      float2 a[4], q[4], k[4];
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const uint32_t at = InRow(column, r);
        const uint32_t q_pair = Lds32(at + C::kQ), k_pair = Lds32(at + C::kK);
        q[r] = {Bf16Lo(q_pair), Bf16Hi(q_pair)};
        k[r] = {Bf16Lo(k_pair), Bf16Hi(k_pair)};
      }
      if (kL2Norm) {
        const uint32_t norms = smem + (warp * 8 + quad * 4) * 4;
        const float4 q_norm = LdsF32x4(norms + C::kQNorm), k_norm = LdsF32x4(norms + C::kKNorm);
        const float q_norms[4] = {q_norm.x, q_norm.y, q_norm.z, q_norm.w},
                    k_norms[4] = {k_norm.x, k_norm.y, k_norm.z, k_norm.w};
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          q[r] = {q[r].x * q_norms[r], q[r].y * q_norms[r]};
          k[r] = {k[r].x * k_norms[r], k[r].y * k_norms[r]};
        }
      }
      QuadDecays(a, g[half], gate, LdsF32x2(smem + C::kGateBias + (half * 64 + 2 * lane) * 4));
      if (rows_left <
          quad * 4 +
              4) {  // another sequence's tokens, or none: selected away, since they may hold NaN
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          if (quad * 4 + r >= rows_left) a[r] = q[r] = k[r] = {0.f, 0.f};
        }
      }
      {
        // The first quad's sum waits in shared memory: registers are short here.
        const uint32_t at = smem + C::kLogDecay + (warp * kHead + half * 64 + 2 * lane) * 4;
        float2 log_decay = {0.f, 0.f};
        if (quad == 1) log_decay = LdsF32x2(at);
#pragma unroll
        for (int r = 0; r < 4; ++r) log_decay = {log_decay.x + a[r].x, log_decay.y + a[r].y};
        StsF32x2(at, log_decay.x, log_decay.y);
      }
#pragma unroll
      for (int r = 0; r < 4; ++r) a[r] = {Ex2(a[r].x), Ex2(a[r].y)};
      // Row by row; d[j] is k_j decayed to the current row. The sums fill two triangles: q_i k_j, i
      // >= j, and k_i k_j, i > j.
      float2 d[4], up = {1.f, 1.f};
      int next_q = 0, next_k = 10;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        up = {up.x * a[i].x, up.y * a[i].y};
#pragma unroll
        for (int j = 0; j < i; ++j) {
          d[j] = {d[j].x * a[i].x, d[j].y * a[i].y};
          sums[next_q] = fmaf(q[i].x, d[j].x, fmaf(q[i].y, d[j].y, sums[next_q]));
          sums[next_k] = fmaf(k[i].x, d[j].x, fmaf(k[i].y, d[j].y, sums[next_k]));
          ++next_q, ++next_k;
        }
        d[i] = k[i];
        sums[next_q] = fmaf(q[i].x, k[i].x, fmaf(q[i].y, k[i].y, sums[next_q]));
        ++next_q;
        const uint32_t at = InRow(column, i);
        Sts32(at + C::kQ, Pack<Operand>(q[i].x * up.x, q[i].y * up.y));
        Sts32(at + C::kK, Pack<Operand>(k[i].x * up.x, k[i].y * up.y));
      }
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        Sts32(InRow(column, r) + C::kKDown, Pack<Operand>(d[r].x, d[r].y));
      }
      StsF32x2(smem + C::kQuadTotals + ((warp * 2 + quad) * kHead + half * 64 + 2 * lane) * 4, up.x,
               up.y);
    }
    const float sum = WarpSum16(sums, lane);
    if ((lane & 1) == 0)
      StsF32(smem + C::kSums + ((warp * 2 + quad) * C::kQuadSums + (lane >> 1)) * 4, sum);
#pragma unroll
    for (int i = 0; i < 8; ++i) g[i >> 2][i & 3] = all_g[1][i >> 2][i & 3];
  }
}

__device__ __forceinline__ float2 Product(float2 x, float2 y) { return {x.x * y.x, x.y * y.y}; }

// Decays between quads, as operands, one row of `factors` each; decays beyond every 8 rows; the
// chunk's decay. A thread takes a pair of channels; each pair of warps takes a kind.
template <typename Operand>
__device__ __forceinline__ void BuildFactors(uint32_t smem, int tid) {
  using C = PrepareConfig;
  const int c = (tid & 63) * 2, kind = tid >> 6;
  const uint32_t column = smem + c * 4;
  auto total = [&](int quad) { return LdsF32x2(column + C::kQuadTotals + quad * kHead * 4); };
  // A lane of a fragment takes channels 2 t, 2 t + 1, 2 t + 8 and 2 t + 9 of every 16: they lie
  // side by side.
  const uint32_t place = smem + C::kFactors + (c & ~15) * 2 + (c >> 1 & 3) * 8 + (c >> 3 & 1) * 4;
  auto store = [&](int row, float2 x) {
    Sts32(place + row * C::kFactorRow, Pack<Operand>(x.x, x.y));
  };
  auto store_across = [&](auto sub) {
    constexpr int I = decltype(sub)::value;
    float2 totals[4 * I], across = {1.f, 1.f};
#pragma unroll
    for (int quad = 0; quad < 4 * I; ++quad) totals[quad] = total(quad);
#pragma unroll
    for (int quad = 4 * I - 1; quad >= 0; --quad) {
      store(C::kAcross + 2 * I * (I - 1) + quad, across);
      across = Product(across, totals[quad]);
    }
  };
  if (kind == 0) {
    store_across(std::integral_constant<int, 3>{});
  } else if (kind == 1) {
    store_across(std::integral_constant<int, 2>{});
    store_across(std::integral_constant<int, 1>{});
  } else if (kind == 2) {
    store(C::kOne, {1.f, 1.f});
#pragma unroll
    for (int I = 0; I < 4; ++I) {
      const float2 t0 = total(4 * I), t1 = total(4 * I + 1), t2 = total(4 * I + 2);
      store(C::kTotals + 2 * I, t1);
      store(C::kTotals + 2 * I + 1, t2);
      if (I > 0) {
        store(C::kBefore + 3 * (I - 1), t0);
        store(C::kBefore + 3 * (I - 1) + 1, Product(t0, t1));
        store(C::kBefore + 3 * (I - 1) + 2, Product(Product(t0, t1), t2));
      }
    }
  } else {
    float2 eight[8], before[8], log_decay = {0.f, 0.f}, after = {1.f, 1.f};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      eight[i] = Product(total(2 * i), total(2 * i + 1));
      const float2 x = LdsF32x2(column + C::kLogDecay + i * kHead * 4);
      log_decay = {log_decay.x + x.x, log_decay.y + x.y};
    }
    StsF32x2(column + C::kDecay, Ex2(log_decay.x), Ex2(log_decay.y));
    before[0] = after;
#pragma unroll
    for (int i = 1; i < 8; ++i) before[i] = Product(before[i - 1], eight[i - 1]);
#pragma unroll
    for (int i = 7; i >= 0; --i) {
      Sts32(column + C::kBeyond + i * kHead * 4, Pack<Operand>(before[i].x, before[i].y));
      Sts32(column + C::kBeyond + i * kHead * 4 + 4, Pack<Operand>(after.x, after.y));
      after = Product(after, eight[i]);
    }
  }
}

// Warp w < 6 takes the products of the w-th pair of sub-blocks (I, J), I > J, row by row.
__device__ __forceinline__ int SubBlockRow(int warp) { return warp >= 3 ? 3 : warp >= 1 ? 2 : 1; }

// Products of sub-block I with an earlier sub-block J: c[0] = q k, c[1] = k k, each 16x16 in two
// 16x8 accumulators.
template <typename Operand>
__device__ __forceinline__ void SubBlockProducts(float (&c)[2][2][4], uint32_t smem, int I, int J,
                                                 int lane) {
  using C = PrepareConfig;
  const int a_row = I * C::kSub + (lane & 15), a_piece = lane >> 4;
  const int b_row = J * C::kSub + (lane & 7) + (lane >> 4) * 8, b_piece = (lane >> 3) & 1;
  // Fragments hold rows g = lane / 4 and g + 8: quads g / 4 and 2 + g / 4.
  const int low = lane >> 4, high = 2 + low;
  const uint32_t factors = smem + C::kFactors + (lane & 3) * 8;
  const uint32_t before_low =
      factors + (low == 0 ? C::kOne : C::kBefore + 3 * (I - 1)) * C::kFactorRow;
  const uint32_t before_high = factors + (C::kBefore + 3 * (I - 1) + high - 1) * C::kFactorRow;
  const uint32_t across = factors + (C::kAcross + 2 * I * (I - 1) + 4 * J + low) * C::kFactorRow;
#pragma unroll 4
  for (int step = 0; step < kHead / 16; ++step) {
    const uint32_t half = (step >> 2) * kHalfTile, piece = (step & 3) * 2;
    uint32_t q[4], k[4], b[4];
    Ldmatrix(q, smem + C::kQ + half + Swizzled(a_row, piece + a_piece));
    Ldmatrix(k, smem + C::kK + half + Swizzled(a_row, piece + a_piece));
    Ldmatrix(b, smem + C::kKDown + half + Swizzled(b_row, piece + b_piece));
    const uint2 low_factor = Lds64(before_low + step * 32),
                high_factor = Lds64(before_high + step * 32);
    const uint32_t before[4] = {low_factor.x, high_factor.x, low_factor.y, high_factor.y};
#pragma unroll
    for (int i = 0; i < 4;
         ++i) {  // rows g, g + 8, g, g + 8; channels 0-7, 0-7, 8-15, 8-15 of the step
      q[i] = MulX2<Operand>(q[i], before[i]);
      k[i] = MulX2<Operand>(k[i], before[i]);
    }
#pragma unroll
    for (int n = 0; n < 2; ++n) {  // columns g, then g + 8; channels 0-7, 8-15
      const uint2 factor = Lds64(across + n * 2 * C::kFactorRow + step * 32);
      b[2 * n] = MulX2<Operand>(b[2 * n], factor.x);
      b[2 * n + 1] = MulX2<Operand>(b[2 * n + 1], factor.y);
    }
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      Mma<Operand>(c[0][n], q, b[2 * n], b[2 * n + 1]);
      Mma<Operand>(c[1][n], k, b[2 * n], b[2 * n + 1]);
    }
  }
}

// Products within sub-block I, between its quads. `outer`: rows 8-15 x 0-7; `inner`: rows 4-7 x 0-3
// and 12-15 x 8-11. q and k are stacked: accumulators 0, 1 are q's, 2, 3 are k's.
template <typename Operand>
__device__ __forceinline__ void DiagonalProducts(float (&outer)[4], float (&inner)[4],
                                                 uint32_t smem, int I, int lane) {
  using C = PrepareConfig;
  const int r = lane & 7,
            pick = lane >> 3;  // this lane's row of which of the four 8x8 matrices it addresses
  const int start = I * C::kSub;
  const int inner_lower = start + 4 + r + (r & 4), inner_upper = start + r + (r & 4);
  const uint32_t a_tile = smem + (pick & 1 ? C::kK : C::kQ), a_piece = pick >> 1;
  const int b_row = pick < 2 ? start + r : inner_upper, b_piece = pick & 1;
  const bool far =
      lane >= 16;  // fragment rows 4-7: for `outer`, quad 3 on the left, quad 1 on the right
  const uint32_t factors = smem + C::kFactors + (lane & 3) * 8;
  const uint32_t left = factors + (far ? C::kTotals + 2 * I + 1 : C::kOne) * C::kFactorRow;
  const uint32_t right = factors + (far ? C::kOne : C::kTotals + 2 * I) * C::kFactorRow;
#pragma unroll
  for (int step = 0; step < kHead / 16; ++step) {
    const uint32_t half = (step >> 2) * kHalfTile, piece = (step & 3) * 2;
    uint32_t a[4], a_inner[4], b[4];
    Ldmatrix(a, a_tile + half + Swizzled(start + 8 + r, piece + a_piece));
    Ldmatrix(a_inner, a_tile + half + Swizzled(inner_lower, piece + a_piece));
    Ldmatrix(b, smem + C::kKDown + half + Swizzled(b_row, piece + b_piece));
    const uint2 left_factor = Lds64(left + step * 32), right_factor = Lds64(right + step * 32);
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = MulX2<Operand>(a[i], i < 2 ? left_factor.x : left_factor.y);
    Mma<Operand>(outer, a, MulX2<Operand>(b[0], right_factor.x),
                 MulX2<Operand>(b[1], right_factor.y));
    Mma<Operand>(inner, a_inner, b[2], b[3]);
  }
}

// Quad operands -> chunk operands, in place, of this warp's two quads: q_decayed, k_decayed,
// k_restored.
template <typename Operand>
__device__ __forceinline__ void ExtendToChunk(uint32_t smem, const uint32_t (&totals)[2][2],
                                              const uint2 (&beyond)[2], int warp, int lane) {
  using C = PrepareConfig;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint32_t before = beyond[half].x, after = beyond[half].y;
#pragma unroll
    for (int quad = 0; quad < 2; ++quad) {
      const uint32_t up = quad == 0 ? before : MulX2<Operand>(before, totals[0][half]);
      const uint32_t down = quad == 1 ? after : MulX2<Operand>(after, totals[1][half]);
      const uint32_t column = smem + half * kHalfTile + warp * 8 * 128 + lane * 4;
      uint32_t x[12];
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const uint32_t at = InRow(column, quad * 4 + r);
        x[r] = Lds32(at + C::kQ);
        x[4 + r] = Lds32(at + C::kK);
        x[8 + r] = Lds32(at + C::kKDown);
      }
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const uint32_t at = InRow(column, quad * 4 + r);
        Sts32(at + C::kQ, MulX2<Operand>(x[r], up));
        Sts32(at + C::kK, MulX2<Operand>(x[4 + r], up));
        Sts32(at + C::kKDown, MulX2<Operand>(x[8 + r], down));
      }
    }
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

// The products in registers and the sums within quads -> Aqk, and L = diag(beta) Akk for the
// inverse.
template <typename Operand, bool kGradient>
__device__ __forceinline__ void StoreProducts(const float (&c)[2][2][4], uint32_t smem, int tid,
                                              int warp, int lane) {
  using C = PrepareConfig;
  const int row = lane >> 2, column = (lane & 3) * 2;
  auto beta_of = [&](int i) {
    const float beta = LdsF32(smem + C::kBeta + i * 4);
    return kGradient ? NotZero(beta) : beta;
  };
  // Row i, columns j and j + 1.
  auto store = [&](int i, int j, float qk0, float qk1, float kk0, float kk1) {
    const float beta = beta_of(i);
    Sts32(AqkAddress(smem, i, j), Pack<Operand>(qk0, qk1));
    StsF32x2(LAddress(smem, i, j), beta * kk0, beta * kk1);
  };
  if (warp < 6) {
    const int I = SubBlockRow(warp), J = warp - I * (I - 1) / 2;
#pragma unroll
    for (int upper = 0; upper < 2; ++upper) {
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        store(I * 16 + row + 8 * upper, J * 16 + n * 8 + column, c[0][n][2 * upper],
              c[0][n][2 * upper + 1], c[1][n][2 * upper], c[1][n][2 * upper + 1]);
      }
    }
  } else {
#pragma unroll
    for (int d = 0; d < 2; ++d) {
      const int start = ((warp - 6) * 2 + d) * 16;
      store(start + 8 + row, start + column, c[d][0][0], c[d][0][1], c[d][0][2], c[d][0][3]);
      if ((row < 4) == (column < 4)) {
        store(start + 4 + row + (row & 4), start + column + (column & 4), c[d][1][0], c[d][1][1],
              c[d][1][2], c[d][1][3]);
      }
    }
  }
  {  // within quads: a thread takes one of the 16 sums of one of the 16 quads
    constexpr uint32_t kRows = 0xfe9ffa94, kColumns = 0x910e4910;  // of sum s: bits 2 s, 2 s + 1
    const int s = tid & 15, quad = tid >> 4;
    const int i = quad * 4 + (kRows >> 2 * s & 3), j = quad * 4 + (kColumns >> 2 * s & 3);
    const float sum = LdsF32(smem + C::kSums + tid * 4);
    if (s < 10) {
      Sts16(AqkAddress(smem, i, j), Pack<Operand>(sum, 0.f));
    } else {
      StsF32(LAddress(smem, i, j), beta_of(i) * sum);
    }
  }
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
  GatePair<G> g[2][2][4];  // this lane's channels of this warp's rows: quad, half, row
  {
    const uint32_t stride = HV * static_cast<uint32_t>(p.K);
    const int second_half = static_cast<int>(p.K) - 64;  // the first one again, if it is all
    const G* row =
        static_cast<const G*>(p.g) + (int64_t{chunk.token + warp * 8} * HV + h) * p.K + 2 * lane;
#pragma unroll
    for (int r = 0; r < 8; ++r, row += stride) {
      g[r >> 2][0][r & 3] = g[r >> 2][1][r & 3] = {};
      if (warp * 8 + r < chunk.valid) {
        g[r >> 2][0][r & 3] = *reinterpret_cast<const GatePair<G>*>(row);
        g[r >> 2][1][r & 3] = *reinterpret_cast<const GatePair<G>*>(row + second_half);
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
  __syncthreads();
  const float A_log = p.A_log == nullptr ? 0.f : p.A_log[chunk.row * p.A_log_stride + h];
  float dt_bias = 0.f;
  const int K = static_cast<int>(p.K);
  if (tid < K && p.dt_bias != nullptr) {
    dt_bias = p.dt_bias[chunk.row * p.dt_bias_stride + h * K + tid];
  }
  MbarrierWait(smem + C::kBarrier, 0);
  if (kL2Norm) RowNorms(smem, warp, lane);
  if (tid < kChunk) {
    float beta = __uint_as_float(p.beta_dtype == DType::kF32 ? beta_bits : beta_bits << 16);
    if (p.beta_mode != BetaMode::kProbability) beta = Rcp(1.f + Ex2(-kLog2E * beta));
    if (p.beta_mode == BetaMode::kTwoSigmoid) beta *= 2.f;
    StsF32(smem + C::kBeta + tid * 4, tid < chunk.valid ? beta : 0.f);
  }
  GateParams gate{p.gate, kLog2E, -Ex2(kLog2E * A_log)};
  if (p.gate == Gate::kLowerBound) gate = {p.gate, kLog2E * gate.scale, p.lower_bound * kLog2E};
  if (tid < kHead) StsF32(smem + C::kGateBias + tid * 4, dt_bias * gate.slope);
  __syncthreads();
  BuildQuads<Operand, kL2Norm>(smem, g, gate, chunk.valid, warp, lane);
  __syncthreads();
  BuildFactors<Operand>(smem, tid);
  __syncthreads();

  // Warps 0-5: one pair of sub-blocks each; warps 6 and 7: two diagonal sub-blocks each.
  float c[2][2][4] = {};
  if (warp < 6) {
    const int I = SubBlockRow(warp);
    SubBlockProducts<Operand>(c, smem, I, warp - I * (I - 1) / 2, lane);
  } else {
#pragma unroll
    for (int d = 0; d < 2; ++d) {
      DiagonalProducts<Operand>(c[d][0], c[d][1], smem, (warp - 6) * 2 + d, lane);
    }
  }
  tid = Opaque(tid), warp = tid >> 5, lane = tid & 31;
  uint2 beyond[2];        // decays before and after this warp's rows, by half,
  uint32_t totals[2][2];  // and over its quads, by quad and half: Aqk takes their place next
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint32_t channel = (half * 64 + 2 * lane) * 4;
    beyond[half] = Lds64(smem + C::kBeyond + warp * kHead * 4 + channel);
#pragma unroll
    for (int quad = 0; quad < 2; ++quad) {
      const float2 total =
          LdsF32x2(smem + C::kQuadTotals + (warp * 2 + quad) * kHead * 4 + channel);
      totals[quad][half] = Pack<Operand>(total.x, total.y);
    }
  }
  __syncthreads();
  ExtendToChunk<Operand>(smem, totals, beyond, warp, lane);
#pragma unroll
  for (int i = 0; i < 2; ++i) Sts128(smem + C::kAqk + (tid + i * C::kThreads) * 16, {0, 0, 0, 0});
  if (kL2Norm && warp < 2) {
    const float beta = LdsF32(smem + C::kBeta + tid * 4), norm = LdsF32(smem + C::kKNorm + tid * 4);
    const uint32_t writes = __ballot_sync(~0u, beta != 0.f && norm != 0.f);
    if (lane == 0) Sts32(smem + C::kWrites + warp * 4, writes);
  }
  FenceProxyAsync();
  __syncthreads();
  std::byte* image =
      ws.images + (int64_t{slot} * HV + h) * (kGradient ? image::kGradientBytes : image::kBytes);
  if (tid == 0) {
    BulkStore(image, smem + C::kQ, 3 * kTile);
    BulkStore(image + image::kDecay, smem + C::kDecay, image::kDecayBytes);
    if (kGradient) BulkStore(image + image::kBeta, smem + C::kBeta, image::kBetaBytes);
    BulkCommit();
  }

  StoreProducts<Operand, kGradient>(c, smem, tid, warp, lane);
  FenceProxyAsync();
  __syncthreads();
  if (tid == 128) {
    BulkStore(image + image::kAqk, smem + C::kAqk, kMatrix);
    BulkCommit();
    BulkWaitRead();
  }
  if (warp >= 4) return;

  InvertUnitLower(smem + C::kL, smem + C::kScratch, warp, lane);
  if constexpr (kGradient) {
    if (tid == 0) BulkWaitRead();  // q has left
    BarSync(1, 128);
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
