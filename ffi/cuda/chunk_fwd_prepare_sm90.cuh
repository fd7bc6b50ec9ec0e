// Prepare: q, k, g, beta of one chunk and value head -> its image (chunk_fwd_sm90.cuh).
//
// Decays are products of a_i = exp(g_i) <= 1, never exp of a positive number, so any gate works: underflow to 0 is the
// right answer, -inf is a reset. They are local first and extended by factors that are themselves products:
//   quad       4 rows:  q_up = q a_s..a_i, k_up = k a_s..a_i (s: the quad's first row), k_down = k a_{i+1}..a_e (e: its last)
//   sub-block 16 rows: `before` = decay from the sub-block's start to the quad, `after` = from the quad to its end
//   chunk     64 rows
// A pair of rows (i, j), i > j, in different quads costs  q_up_i (decay between the quads) k_down_j: tensor cores, with the
// decay between folded into the fragments. Pairs within a quad are summed in fp32 while the quad is in registers.
//
// Grid: one block a chunk slot and value head. Block: 8 warps; when building, warp w owns sub-block w / 2 and 64 channels,
// a lane 2 channels, so all decays live in one lane. Three blocks share an SM: 76,560 bytes, 80 registers a thread.
#pragma once

#include <type_traits>

#include "chunk_fwd_sm90.cuh"

namespace jax_kda::sm90 {

inline constexpr float kLog2E = 1.4426950408889634f;

struct PrepareConfig {
  static constexpr int kThreads = 256;
  static constexpr int kSub = 16;        // rows of a sub-block
  static constexpr int kQuad = 4;        // rows of a quad
  static constexpr int kQuadSums = 16;   // products within a quad: 10 of q (i >= j), 6 of k (i > j)
  static constexpr int kFactorRow = kHead * 2 + 16;  // bytes; the 16 put the rows of two quads on different banks
  // Rows of factors: 1, `before` of quads 1-3 of sub-blocks 1-3, decay from each earlier quad to sub-blocks 1-3,
  // totals of quads 1 and 2 of every sub-block.
  static constexpr int kOne = 0, kBefore = 1, kAcross = kBefore + 9, kTotals = kAcross + 24, kFactorRows = kTotals + 8;
  static constexpr int kBlockRow = 20 * 4;           // bytes of a row of a 16x16 fp32 block, padded against conflicts
  static constexpr int kBlock = kSub * kBlockRow;

  // Shared memory, bytes. Lifetimes: factors, then the blocks of I + L and of its inverse; quad totals, then Aqk; quad
  // sums, then scratch of the inverse; q_decayed, then A_inv.
  static constexpr int kQ = 0, kK = kTile, kKDown = 2 * kTile;
  static constexpr int kL = 3 * kTile, kFactors = kL;
  static constexpr int kQuadTotals = kL + 10 * kBlock, kAqk = kQuadTotals;  // [16, K] fp32; [64, 64]
  static constexpr int kScratch = kAqk + kMatrix;                           // [4] blocks
  static constexpr int kSums = kScratch;                                    // [2 halves, 16 quads, 16] fp32
  static constexpr int kLogDecay = kSums + 2 * 16 * kQuadSums * 4;          // [4, K] fp32, log2
  static constexpr int kDecay = kScratch + 4 * kBlock;                      // [K] fp32
  static constexpr int kQNorm = kDecay + kHead * 4, kKNorm = kQNorm + kChunk * 4, kBeta = kKNorm + kChunk * 4;
  static constexpr int kBarrier = kBeta + kChunk * 4;
  static constexpr int kBytes = kBarrier + 16;
  static_assert(kFactorRows * kFactorRow <= 10 * kBlock);
  static_assert(kLogDecay + 4 * kHead * 4 <= kScratch + 4 * kBlock);
  static_assert(16 * kHead * 4 == kMatrix);
  static_assert(3 * (kBytes + 1024) <= 228 * 1024, "three blocks an SM, each with 1 KB of the system's");
};

__device__ __forceinline__ uint32_t BlockOffset(int I, int J) { return (I * (I + 1) / 2 + J) * PrepareConfig::kBlock; }

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

struct GateParams {
  Gate gate;
  float slope;        // exp(A_log)
  float lower_bound;  // in log2
  float2 dt_bias;     // of this lane's channels
};
// log2(1 + e^x). lg2.approx has an absolute error, so small e^x take the series, and beyond 2^20 it is x itself.
__device__ __forceinline__ float Softplus2(float x) {
  const float y = x * kLog2E, z = Ex2(y);
  const float series = z * kLog2E * (1.f - z * (0.5f - z * (1.f / 3 - z * (0.25f - z * 0.2f))));
  return z < 0.0625f ? series : y > 20.f ? y : Lg2(1.f + z);
}
__device__ __forceinline__ float Sigmoid(float x) { return Rcp(1.f + Ex2(-kLog2E * x)); }

// Log decays, base 2, of a quad and this lane's channels.
template <typename G>
__device__ __forceinline__ void QuadDecays(float2 (&log2_a)[4], const GatePair<G>* g, const GateParams& p) {
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    const float2 x = g[r].Floats();
    log2_a[r] = {x.x + p.dt_bias.x, x.y + p.dt_bias.y};
  }
  switch (p.gate) {  // uniform; around the loops, so that the elements of a quad overlap
    case Gate::kActivated:
#pragma unroll
      for (float2& x : log2_a) x = {x.x * kLog2E, x.y * kLog2E};
      break;
    case Gate::kSoftplus:
#pragma unroll
      for (float2& x : log2_a) x = {-p.slope * Softplus2(x.x), -p.slope * Softplus2(x.y)};
      break;
    case Gate::kLowerBound:
#pragma unroll
      for (float2& x : log2_a) x = {p.lower_bound * Sigmoid(p.slope * x.x), p.lower_bound * Sigmoid(p.slope * x.y)};
      break;
  }
}

// One step of a butterfly sum over the warp: 2 kKeep values become kKeep, the upper ones on lanes with bit 2 kKeep.
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

// c (16x16, in two 16x8 accumulators) += a b, fp32 blocks of shared memory in TF32.
__device__ __forceinline__ void BlockProduct(float (&c)[2][4], uint32_t a, uint32_t b, int lane) {
  constexpr int kRow = PrepareConfig::kBlockRow;
  const int g = lane >> 2, t = lane & 3;
#pragma unroll
  for (int step = 0; step < 2; ++step) {
    const uint32_t left = a + g * kRow + (step * 8 + t) * 4;
    const uint32_t fragment[4] = {CvtTf32(LdsF32(left)), CvtTf32(LdsF32(left + 8 * kRow)), CvtTf32(LdsF32(left + 16)),
                                  CvtTf32(LdsF32(left + 8 * kRow + 16))};
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const uint32_t right = b + (step * 8 + t) * kRow + (n * 8 + g) * 4;
      MmaTf32(c[n], fragment, CvtTf32(LdsF32(right)), CvtTf32(LdsF32(right + 4 * kRow)));
    }
  }
}
__device__ __forceinline__ void StoreBlock(uint32_t block, const float (&c)[2][4], float sign, int lane) {
  constexpr int kRow = PrepareConfig::kBlockRow;
  const uint32_t a = block + (lane >> 2) * kRow + (lane & 3) * 8;
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    StsF32x2(a + n * 32, sign * c[n][0], sign * c[n][1]);
    StsF32x2(a + 8 * kRow + n * 32, sign * c[n][2], sign * c[n][3]);
  }
}

// 1 / norm of every row of q and k. A task is a quarter of a row; its pieces are read in an order that spreads the banks.
__device__ __forceinline__ void RowNorms(uint32_t smem, int tid) {
  using C = PrepareConfig;
#pragma unroll
  for (int which = 0; which < 2; ++which) {
    const uint32_t tile = smem + (which ? C::kK : C::kQ);
    const int row = tid >> 2, quarter = tid & 3, half = quarter >> 1;
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint4 x = Lds128(tile + half * kHalfTile + Swizzled(row, (quarter & 1) * 4 + (i ^ (half * 2))));
      const uint32_t pairs[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        sum = fmaf(Bf16Lo(pairs[j]), Bf16Lo(pairs[j]), sum);
        sum = fmaf(Bf16Hi(pairs[j]), Bf16Hi(pairs[j]), sum);
      }
    }
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    if (quarter == 0) StsF32(smem + (which ? C::kKNorm : C::kQNorm) + row * 4, Rsqrt(sum + 1e-6f));
  }
}

// The quads of one sub-block and 64 channels: q_up, k_up, k_down in place of q and k, quad totals, products within quads.
template <typename Operand, bool kL2Norm, typename G>
__device__ __forceinline__ void BuildQuads(uint32_t smem, const GatePair<G> (&g)[16], const GateParams& gate, int valid, int warp,
                                           int lane) {
  using C = PrepareConfig;
  const int sub = warp >> 1, half = warp & 1, channel = half * 64 + 2 * lane;
  const uint32_t column = smem + half * kHalfTile + sub * C::kSub * 128 + (lane & 3) * 4;
  const int rows_left = valid - sub * C::kSub;
  float2 log_decay = {0.f, 0.f};
#pragma unroll
  for (int quad = 0; quad < 4; ++quad) {
    float2 a[4], q[4], k[4];
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const uint32_t at = column + Swizzled(quad * 4 + r, lane >> 2);
      const uint32_t q_pair = Lds32(at + C::kQ), k_pair = Lds32(at + C::kK);
      q[r] = {Bf16Lo(q_pair), Bf16Hi(q_pair)};
      k[r] = {Bf16Lo(k_pair), Bf16Hi(k_pair)};
    }
    if (kL2Norm) {
      const uint32_t norms = smem + (sub * C::kSub + quad * 4) * 4;
      const float4 q_norm = LdsF32x4(norms + C::kQNorm), k_norm = LdsF32x4(norms + C::kKNorm);
      const float q_norms[4] = {q_norm.x, q_norm.y, q_norm.z, q_norm.w}, k_norms[4] = {k_norm.x, k_norm.y, k_norm.z, k_norm.w};
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        q[r] = {q[r].x * q_norms[r], q[r].y * q_norms[r]};
        k[r] = {k[r].x * k_norms[r], k[r].y * k_norms[r]};
      }
    }
    QuadDecays(a, &g[quad * 4], gate);
    if (rows_left < quad * 4 + 4) {  // another sequence's tokens, or none: selected away, since they may hold NaN
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        if (quad * 4 + r >= rows_left) a[r] = q[r] = k[r] = {0.f, 0.f};
      }
    }
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      log_decay = {log_decay.x + a[r].x, log_decay.y + a[r].y};
      a[r] = {Ex2(a[r].x), Ex2(a[r].y)};
    }
    // Products within the quad, row by row: `d[j]` is k_j decayed to the current row.
    float sums[C::kQuadSums];
    float2 d[4], up = {1.f, 1.f};
    int next_q = 0, next_k = 10;
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      up = {up.x * a[r].x, up.y * a[r].y};
#pragma unroll
      for (int j = 0; j < r; ++j) {
        d[j] = {d[j].x * a[r].x, d[j].y * a[r].y};
        sums[next_q++] = fmaf(q[r].x, d[j].x, q[r].y * d[j].y);
        sums[next_k++] = fmaf(k[r].x, d[j].x, k[r].y * d[j].y);
      }
      d[r] = k[r];
      sums[next_q++] = fmaf(q[r].x, k[r].x, q[r].y * k[r].y);
      const uint32_t at = column + Swizzled(quad * 4 + r, lane >> 2);
      Sts32(at + C::kQ, Pack<Operand>(q[r].x * up.x, q[r].y * up.y));
      Sts32(at + C::kK, Pack<Operand>(k[r].x * up.x, k[r].y * up.y));
    }
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      Sts32(column + Swizzled(quad * 4 + r, lane >> 2) + C::kKDown, Pack<Operand>(d[r].x, d[r].y));
    }
    StsF32x2(smem + C::kQuadTotals + ((sub * 4 + quad) * kHead + channel) * 4, up.x, up.y);
    const float sum = WarpSum16(sums, lane);
    if ((lane & 1) == 0) {
      StsF32(smem + C::kSums + ((half * 16 + sub * 4 + quad) * C::kQuadSums + (lane >> 1)) * 4, sum);
    }
  }
  StsF32x2(smem + C::kLogDecay + (sub * kHead + channel) * 4, log_decay.x, log_decay.y);
}

// Decays between quads, as operands, one row of `factors` each; the chunk's decay. Two threads a channel.
template <typename Operand>
__device__ __forceinline__ void BuildFactors(uint32_t smem, int tid) {
  using C = PrepareConfig;
  const int c = tid & (kHead - 1);
  float total[16];
#pragma unroll
  for (int quad = 0; quad < 16; ++quad) total[quad] = LdsF32(smem + C::kQuadTotals + (quad * kHead + c) * 4);
  auto store = [&](int row, float x) { Sts16(smem + C::kFactors + row * C::kFactorRow + c * 2, Pack<Operand>(x, 0.f)); };
  if (tid < kHead) {
#pragma unroll
    for (int I = 1; I < 4; ++I) {
      float across = 1.f;
#pragma unroll
      for (int quad = 4 * I - 1; quad >= 0; --quad) {
        store(C::kAcross + 2 * I * (I - 1) + quad, across);
        across *= total[quad];
      }
    }
  } else {
    store(C::kOne, 1.f);
#pragma unroll
    for (int I = 0; I < 4; ++I) {
      store(C::kTotals + 2 * I, total[4 * I + 1]);
      store(C::kTotals + 2 * I + 1, total[4 * I + 2]);
      if (I > 0) {
        store(C::kBefore + 3 * (I - 1), total[4 * I]);
        store(C::kBefore + 3 * (I - 1) + 1, total[4 * I] * total[4 * I + 1]);
        store(C::kBefore + 3 * (I - 1) + 2, total[4 * I] * total[4 * I + 1] * total[4 * I + 2]);
      }
    }
    float log_decay = 0.f;
#pragma unroll
    for (int I = 0; I < 4; ++I) log_decay += LdsF32(smem + C::kLogDecay + (I * kHead + c) * 4);
    StsF32(smem + C::kDecay + c * 4, Ex2(log_decay));
  }
}

// Products of sub-block I with an earlier sub-block J: c[0] = q k, c[1] = k k, each 16x16 in two 16x8 accumulators.
template <typename Operand>
__device__ __forceinline__ void SubBlockProducts(float (&c)[2][2][4], uint32_t smem, int I, int J, int lane) {
  using C = PrepareConfig;
  const int a_row = I * C::kSub + (lane & 15), a_piece = lane >> 4;
  const int b_row = J * C::kSub + (lane & 7) + (lane >> 4) * 8, b_piece = (lane >> 3) & 1;
  // Fragments hold rows g = lane / 4 and g + 8: quads g / 4 and 2 + g / 4.
  const int low = lane >> 4, high = 2 + low;
  const uint32_t factors = smem + C::kFactors + (lane & 3) * 4;
  const uint32_t before_low = factors + (low == 0 ? C::kOne : C::kBefore + 3 * (I - 1)) * C::kFactorRow;
  const uint32_t before_high = factors + (C::kBefore + 3 * (I - 1) + high - 1) * C::kFactorRow;
  const uint32_t across = factors + (C::kAcross + 2 * I * (I - 1) + 4 * J + low) * C::kFactorRow;
#pragma unroll
  for (int step = 0; step < kHead / 16; ++step) {
    const uint32_t half = (step >> 2) * kHalfTile, piece = (step & 3) * 2;
    uint32_t q[4], k[4], b[4];
    Ldmatrix(q, smem + C::kQ + half + Swizzled(a_row, piece + a_piece));
    Ldmatrix(k, smem + C::kK + half + Swizzled(a_row, piece + a_piece));
    Ldmatrix(b, smem + C::kKDown + half + Swizzled(b_row, piece + b_piece));
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // rows g, g + 8, g, g + 8; channels 0-7, 0-7, 8-15, 8-15 of the step
      const uint32_t f = Lds32((i & 1 ? before_high : before_low) + step * 32 + (i >> 1) * 16);
      q[i] = MulX2<Operand>(q[i], f);
      k[i] = MulX2<Operand>(k[i], f);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // columns g (channels 0-7, 8-15), then g + 8
      b[i] = MulX2<Operand>(b[i], Lds32(across + (i >> 1) * 2 * C::kFactorRow + step * 32 + (i & 1) * 16));
    }
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      Mma<Operand>(c[0][n], q, b[2 * n], b[2 * n + 1]);
      Mma<Operand>(c[1][n], k, b[2 * n], b[2 * n + 1]);
    }
  }
}

// Products within sub-block I, between its quads. `outer`: rows 8-15 x 0-7; `inner`: rows 4-7 x 0-3 and 12-15 x 8-11.
// q and k are stacked: accumulators 0, 1 are q's, 2, 3 are k's.
template <typename Operand>
__device__ __forceinline__ void DiagonalProducts(float (&outer)[4], float (&inner)[4], uint32_t smem, int I, int lane) {
  using C = PrepareConfig;
  const int r = lane & 7, pick = lane >> 3;  // this lane's row of which of the four 8x8 matrices it addresses
  const int start = I * C::kSub;
  const int inner_lower = start + 4 + r + (r & 4), inner_upper = start + r + (r & 4);
  const uint32_t a_tile = smem + (pick & 1 ? C::kK : C::kQ), a_piece = pick >> 1;
  const int b_row = pick < 2 ? start + r : inner_upper, b_piece = pick & 1;
  const bool far = lane >= 16;  // fragment rows 4-7: for `outer`, quad 3 on the left, quad 1 on the right
  const uint32_t factors = smem + C::kFactors + (lane & 3) * 4;
  const uint32_t left = factors + (far ? C::kTotals + 2 * I + 1 : C::kOne) * C::kFactorRow;
  const uint32_t right = factors + (far ? C::kOne : C::kTotals + 2 * I) * C::kFactorRow;
#pragma unroll
  for (int step = 0; step < kHead / 16; ++step) {
    const uint32_t half = (step >> 2) * kHalfTile, piece = (step & 3) * 2;
    uint32_t a[4], a_inner[4], b[4];
    Ldmatrix(a, a_tile + half + Swizzled(start + 8 + r, piece + a_piece));
    Ldmatrix(a_inner, a_tile + half + Swizzled(inner_lower, piece + a_piece));
    Ldmatrix(b, smem + C::kKDown + half + Swizzled(b_row, piece + b_piece));
    const uint32_t left_low = Lds32(left + step * 32), left_high = Lds32(left + step * 32 + 16);
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = MulX2<Operand>(a[i], i < 2 ? left_low : left_high);
    Mma<Operand>(outer, a, MulX2<Operand>(b[0], Lds32(right + step * 32)), MulX2<Operand>(b[1], Lds32(right + step * 32 + 16)));
    Mma<Operand>(inner, a_inner, b[2], b[3]);
  }
}

// Quad operands -> chunk operands, in place: q_decayed, k_decayed, k_restored of one sub-block and 64 channels.
template <typename Operand>
__device__ __forceinline__ void ExtendToChunk(uint32_t smem, const uint32_t (&before)[4], const uint32_t (&after)[4], int warp,
                                              int lane) {
  using C = PrepareConfig;
  const uint32_t column = smem + (warp & 1) * kHalfTile + (warp >> 1) * C::kSub * 128 + (lane & 3) * 4;
#pragma unroll
  for (int quad = 0; quad < 4; ++quad) {
    uint32_t x[12];
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const uint32_t at = column + Swizzled(quad * 4 + r, lane >> 2);
      x[r] = Lds32(at + C::kQ);
      x[4 + r] = Lds32(at + C::kK);
      x[8 + r] = Lds32(at + C::kKDown);
    }
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const uint32_t at = column + Swizzled(quad * 4 + r, lane >> 2);
      Sts32(at + C::kQ, MulX2<Operand>(x[r], before[quad]));
      Sts32(at + C::kK, MulX2<Operand>(x[4 + r], before[quad]));
      Sts32(at + C::kKDown, MulX2<Operand>(x[8 + r], after[quad]));
    }
  }
}

// (I + L)^-1 in place of the blocks of L, by the first four warps. Diagonal blocks by forward substitution, a lane a
// column; then X21 = -X22 L21 X11 for 16 + 16 and 32 + 32 rows.
__device__ __forceinline__ void InvertUnitLower(uint32_t smem, int warp, int lane) {
  using C = PrepareConfig;
  const uint32_t L = smem + C::kL, scratch = smem + C::kScratch + warp * C::kBlock;
  {
    const uint32_t block = L + BlockOffset(warp, warp);
    const int j = lane & 15;
    float x[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      float even = i == j ? 1.f : 0.f, odd = 0.f;
#pragma unroll
      for (int m = 0; m < i; m += 4) {
        const float4 l = LdsF32x4(block + i * C::kBlockRow + m * 4);
        even = fmaf(-l.x, x[m], even);
        if (m + 1 < i) odd = fmaf(-l.y, x[m + 1], odd);
        if (m + 2 < i) even = fmaf(-l.z, x[m + 2], even);
        if (m + 3 < i) odd = fmaf(-l.w, x[m + 3], odd);
      }
      x[i] = even + odd;
    }
    __syncwarp();
    if (lane < 16) {
#pragma unroll
      for (int i = 0; i < 16; ++i) StsF32(block + i * C::kBlockRow + j * 4, x[i]);
    }
  }
  BarSync(1, 128);
  if (warp < 2) {
    const int J = 2 * warp, I = J + 1;
    float t[2][4] = {}, x[2][4] = {};
    BlockProduct(t, L + BlockOffset(I, J), L + BlockOffset(J, J), lane);
    StoreBlock(scratch, t, 1.f, lane);
    __syncwarp();
    BlockProduct(x, L + BlockOffset(I, I), scratch, lane);
    StoreBlock(L + BlockOffset(I, J), x, -1.f, lane);
  }
  BarSync(1, 128);
  const int I = 2 + (warp >> 1), J = warp & 1;
  float t[2][4] = {}, x[2][4] = {};
  for (int m = J; m < 2; ++m) BlockProduct(t, L + BlockOffset(I, m), L + BlockOffset(m, J), lane);
  StoreBlock(scratch, t, 1.f, lane);
  BarSync(1, 128);
  for (int m = 2; m <= I; ++m) {
    BlockProduct(x, L + BlockOffset(I, m), smem + C::kScratch + ((m - 2) * 2 + J) * C::kBlock, lane);
  }
  StoreBlock(L + BlockOffset(I, J), x, -1.f, lane);
  BarSync(1, 128);
}

// Aqk entry and L entry (i, j), i >= j, from the products q_i k_j and k_i k_j.
template <typename Operand>
__device__ __forceinline__ uint32_t AqkAddress(uint32_t smem, int i, int j) {
  return smem + PrepareConfig::kAqk + Swizzled(i, j >> 3) + (j & 7) * 2;
}
__device__ __forceinline__ uint32_t LAddress(uint32_t smem, int i, int j) {
  return smem + PrepareConfig::kL + BlockOffset(i >> 4, j >> 4) + (i & 15) * PrepareConfig::kBlockRow + (j & 15) * 4;
}

// With q and k normalised every operand is at most 1 and fp16 holds it; as given they may be anything and take bf16.
template <bool kL2Norm, typename G>
__global__ void __launch_bounds__(PrepareConfig::kThreads, sizeof(G) == 2 ? 3 : 2)
    ChunkFwdPrepareKernel(const __grid_constant__ CUtensorMap q_map, const __grid_constant__ CUtensorMap k_map,
                          const __grid_constant__ ChunkFwdParams p, const __grid_constant__ Workspace ws) {
  using C = PrepareConfig;
  using Operand = std::conditional_t<kL2Norm, Fp16, Bf16>;
  extern __shared__ __align__(1024) uint8_t shared[];
  const uint32_t smem = SharedAddress(shared);
  const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31;
  const int HV = static_cast<int>(p.HV), h = blockIdx.x % HV;
  const int64_t slot = blockIdx.x / HV;
  const ChunkSlot chunk = FindChunk(p, ws, slot);
  if (chunk.valid == 0) return;
  std::byte* image = ws.images + (slot * HV + h) * image::kBytes;

  if (tid == 0) {
    const int qk_head = h / static_cast<int>(p.HV / p.H);
    MbarrierInit(smem + C::kBarrier, 1);
    FenceMbarrierInit();
    MbarrierExpectTx(smem + C::kBarrier, 2 * kTile);
    TmaLoad(smem + C::kQ, &q_map, smem + C::kBarrier, qk_head, chunk.token, 0);
    TmaLoad(smem + C::kK, &k_map, smem + C::kBarrier, qk_head, chunk.token, 0);
  }
  const int channel = (warp & 1) * 64 + 2 * lane;
  GatePair<G> g[16];
  {
    const int first = (warp >> 1) * C::kSub;
    const G* row = static_cast<const G*>(p.g) + (int64_t{chunk.token + first} * HV + h) * kHead + channel;
#pragma unroll
    for (int r = 0; r < 16; ++r) {
      g[r] = {};
      if (first + r < chunk.valid) g[r] = *reinterpret_cast<const GatePair<G>*>(row + int64_t{r} * HV * kHead);
    }
  }
  if (tid < kChunk) {
    float beta = 0.f;
    if (tid < chunk.valid) {
      const int64_t at = int64_t{chunk.token + tid} * HV + h;
      beta = p.beta_dtype == DType::kF32 ? static_cast<const float*>(p.beta)[at]
                                         : __bfloat162float(static_cast<const __nv_bfloat16*>(p.beta)[at]);
      if (p.beta_mode != BetaMode::kProbability) beta = Sigmoid(beta);
      if (p.beta_mode == BetaMode::kTwoSigmoid) beta *= 2.f;
    }
    StsF32(smem + C::kBeta + tid * 4, beta);
  }
  GateParams gate{p.gate, 1.f, p.lower_bound * kLog2E, {0.f, 0.f}};
  if (p.A_log != nullptr) gate.slope = Ex2(kLog2E * p.A_log[chunk.row * p.A_log_stride + h]);
  if (p.dt_bias != nullptr) {
    gate.dt_bias = *reinterpret_cast<const float2*>(p.dt_bias + chunk.row * p.dt_bias_stride + h * kHead + channel);
  }
  __syncthreads();
  MbarrierWait(smem + C::kBarrier, 0);
  if (kL2Norm) {
    RowNorms(smem, tid);
    __syncthreads();
  }
  BuildQuads<Operand, kL2Norm>(smem, g, gate, chunk.valid, warp, lane);
  __syncthreads();
  BuildFactors<Operand>(smem, tid);
  __syncthreads();

  // Warps 0-5: one pair of sub-blocks each; warps 6 and 7: two diagonal sub-blocks each.
  const int I = warp >= 3 ? 3 : warp >= 1 ? 2 : 1, J = warp - I * (I - 1) / 2;
  float c[2][2][4] = {};
  if (warp < 6) {
    SubBlockProducts<Operand>(c, smem, I, J, lane);
  } else {
#pragma unroll
    for (int d = 0; d < 2; ++d) DiagonalProducts<Operand>(c[d][0], c[d][1], smem, (warp - 6) * 2 + d, lane);
  }
  uint32_t before[4], after[4];  // decay from the chunk's start to each quad, and from each quad to its end
  {
    float2 own[4], log_before = {0.f, 0.f}, log_after = {0.f, 0.f};
#pragma unroll
    for (int sub = 0; sub < 4; ++sub) {
      own[sub] = LdsF32x2(smem + C::kQuadTotals + (((warp >> 1) * 4 + sub) * kHead + channel) * 4);
      const float2 x = LdsF32x2(smem + C::kLogDecay + (sub * kHead + channel) * 4);
      if (sub < warp >> 1) log_before = {log_before.x + x.x, log_before.y + x.y};
      if (sub > warp >> 1) log_after = {log_after.x + x.x, log_after.y + x.y};
    }
    float2 product = {Ex2(log_before.x), Ex2(log_before.y)};
#pragma unroll
    for (int quad = 0; quad < 4; ++quad) {
      before[quad] = Pack<Operand>(product.x, product.y);
      product = {product.x * own[quad].x, product.y * own[quad].y};
    }
    product = {Ex2(log_after.x), Ex2(log_after.y)};
#pragma unroll
    for (int quad = 3; quad >= 0; --quad) {
      after[quad] = Pack<Operand>(product.x, product.y);
      product = {product.x * own[quad].x, product.y * own[quad].y};
    }
  }
  __syncthreads();
  ExtendToChunk<Operand>(smem, before, after, warp, lane);
#pragma unroll
  for (int i = 0; i < 2; ++i) Sts128(smem + C::kAqk + (tid + i * C::kThreads) * 16, {0, 0, 0, 0});
  FenceProxyAsync();
  __syncthreads();
  if (tid == 0) {
    BulkStore(image, smem + C::kQ, 3 * kTile);
    BulkStore(image + image::kDecay, smem + C::kDecay, kHead * 4);
    BulkCommit();
  }

  const int row = lane >> 2, column = (lane & 3) * 2;
  auto store = [&](int i, int j, float qk0, float qk1, float kk0, float kk1) {  // columns j and j + 1
    const float beta = LdsF32(smem + C::kBeta + i * 4);
    Sts32(AqkAddress<Operand>(smem, i, j), Pack<Operand>(qk0, qk1));
    StsF32x2(LAddress(smem, i, j), beta * kk0, beta * kk1);
  };
  if (warp < 6) {
#pragma unroll
    for (int upper = 0; upper < 2; ++upper) {
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        store(I * 16 + row + 8 * upper, J * 16 + n * 8 + column, c[0][n][2 * upper], c[0][n][2 * upper + 1],
              c[1][n][2 * upper], c[1][n][2 * upper + 1]);
      }
    }
  } else {
#pragma unroll
    for (int d = 0; d < 2; ++d) {
      const int start = ((warp - 6) * 2 + d) * 16;
      store(start + 8 + row, start + column, c[d][0][0], c[d][0][1], c[d][0][2], c[d][0][3]);
      if ((row < 4) == (column < 4)) {
        store(start + 4 + row + (row & 4), start + column + (column & 4), c[d][1][0], c[d][1][1], c[d][1][2], c[d][1][3]);
      }
    }
  }
  {  // within quads: thread -> one of the 16 sums of one of the 16 quads
    const int quad = tid >> 4, s = tid & 15;
    const uint32_t sums = smem + C::kSums + tid * 4;
    const float sum = LdsF32(sums) + LdsF32(sums + 16 * C::kQuadSums * 4);
    const bool is_q = s < 10;
    int i = 0, j = is_q ? s : s - 10;  // entry j of a triangle stored row by row
    if (!is_q) i = 1;
    for (int length = 1; j >= length; ++length) {
      j -= length;
      ++i;
    }
    i += quad * 4;
    j += quad * 4;
    if (is_q) {
      Sts16(AqkAddress<Operand>(smem, i, j), Pack<Operand>(sum, 0.f));
    } else {
      StsF32(LAddress(smem, i, j), LdsF32(smem + C::kBeta + i * 4) * sum);
    }
  }
  FenceProxyAsync();
  __syncthreads();
  if (tid == 128) {
    BulkStore(image + image::kAqk, smem + C::kAqk, kMatrix);
    BulkCommit();
    BulkWaitRead();
  }
  if (warp >= 4) return;

  InvertUnitLower(smem, warp, lane);
  if (tid == 0) BulkWaitRead();  // q_decayed has left: A_inv takes its place
  BarSync(1, 128);
  {
    const int i = tid >> 1;
#pragma unroll
    for (int u = 0; u < 4; ++u) {
      const int piece = (tid & 1) * 4 + u, j = piece * 8;
      uint4 packed = {0, 0, 0, 0};
      if (j >> 4 <= i >> 4) {
        const uint32_t x = LAddress(smem, i, j), beta = smem + C::kBeta + j * 4;
        const float4 x0 = LdsF32x4(x), x1 = LdsF32x4(x + 16), b0 = LdsF32x4(beta), b1 = LdsF32x4(beta + 16);
        packed = {Pack<Operand>(x0.x * b0.x, x0.y * b0.y), Pack<Operand>(x0.z * b0.z, x0.w * b0.w),
                  Pack<Operand>(x1.x * b1.x, x1.y * b1.y), Pack<Operand>(x1.z * b1.z, x1.w * b1.w)};
      }
      Sts128(smem + C::kQ + Swizzled(i, piece), packed);
    }
  }
  FenceProxyAsync();
  BarSync(1, 128);
  if (tid == 0) {
    BulkStore(image + image::kAInv, smem + C::kQ, kMatrix);
    BulkCommit();
    BulkWaitRead();
  }
}

}  // namespace jax_kda::sm90
