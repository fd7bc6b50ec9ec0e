// The gradients of the pairs of tokens of a chunk, and the state's parts of dq, dk and dG: what the
// gradients kernel does with a chunk once dAqk, dAkk and the normalised operands are in shared
// memory.
//
// A warp owns 16 channels of 32 tokens, one side of the chunk, and everything is held transposed,
// [channels, tokens]: then a lane has the same elements of accumulators and of left operands, of
// two channels (g and g + 8) the tokens 8 n + 2 t and 8 n + 2 t + 1, and decays are products within
// a lane or with the three other lanes of its channels. Warps share the 64x64 matrices and the
// norms, and two sides of the same channels what goes from one to the other.
//
// Pairs of tokens meet at the level of the highest bit in which their places differ: at level s the
// chunk falls into blocks of s tokens, and of each pair of blocks the upper one reads what the
// lower one wrote,
//
//   f_i = decay from the block's start to i, inclusive (upper)    or after i to its end (lower)
//   (upper) dq_i += f_i sum_j dAqk_ij (k f)_j    dk_i += f_i sum_j dAkk_ij (k f)_j
//   (lower) dk_j += f_j sum_i (dAqk_ij (q f)_i + dAkk_ij (k f)_i)
//
// so every decay is a product of exp(g) <= 1, for any gate, and six levels of small products on
// tensor cores are all pairs. dg_t is what the pairs j < t <= i leave over of a sum over all: the
// same rounded operands stand on both sides, so that the others cancel.
#pragma once

#include <type_traits>

#include "chunk_bwd_sm90.cuh"

namespace jax_kda::sm90 {

struct GradientsConfig {
  static constexpr int kThreads = kGradientThreads;
  // A row of fp32 g; the 16 put the rows of a lane's neighbours on different banks.
  static constexpr int kWideRow = kHead * 4 + 16;

  // Shared memory, bytes. dq, dk and dg take the places of q, k and g.
  static constexpr int kQ = 0, kK = kTile, kDo = 2 * kTile;
  static constexpr int kE = 3 * kTile, kY = 4 * kTile;  // as in the record
  static constexpr int kState = 5 * kTile, kDState = kState + record::kStateTile;
  static constexpr int kDAqk = kDState + record::kStateTile;  // [64, 64], strictly lower
  static constexpr int kDAkk = kDAqk + kMatrix;               // [64, 64], symmetric
  // What the sides exchange: in the place of do, e and y between the products with the states and
  // the next record, and of dAkk at last.
  static constexpr int kLowerK = kDo, kUpperK = kDo + 8192, kUpperQ = kDo + 16384;  // operands
  static constexpr int kTotals = kDo + 24576;  // [2, K] fp32  decay over a side
  // [4, 2, K] of two fp32: decay from a side's start to n-tile n, and after it to the side's end
  static constexpr int kAround = kTotals + 2 * kHead * 4;
  static_assert(kAround + 4 * 2 * kHead * 8 <= kState);
  static constexpr int kSides = kDAkk;        // [2, K] of two fp32: sums of dG and of `outside`
  static constexpr int kDots = kDAqk;         // [8, 128] fp32
  static constexpr int kG = kDAkk + kMatrix;  // a tile, or 64 wide rows
  static constexpr int kAlpha = kG + kChunk * kWideRow;       // [8, threads, 4] fp32: exp(g)
  static constexpr int kNorms = kAlpha + kChunk * kHead * 4;  // [128] fp32: 1 / norm of q, of k
  static constexpr int kDiagonal = kNorms + 2 * kChunk * 4;   // [64] fp32 of dAqk
  static constexpr int kDecay = kDiagonal + kChunk * 4, kBeta = kDecay + kHead * 4;
  static constexpr int kRecordFull = kBeta + kChunk * 4, kInputsFull = kRecordFull + 8;
  static constexpr int kSteps = kInputsFull + 8;  // this one and the next: [2] of 64 bytes
  static constexpr int kBytes = kSteps + 128;
  static_assert(record::kE == 2 * record::kStateTile && record::kY == record::kE + kTile);
  static_assert(kBytes <= 232448, "shared memory a block may ask for on sm_90");
};

// This lane's row and piece of the four 8x8 matrices of a 16x16 block at row 0, piece 0: in the
// order of a left operand's registers when transposed, of a right operand's (two columns of 8 rows)
// when not; and the other way round.
struct Corners {
  int down_first_row, down_first_piece, right_first_row, right_first_piece;
  __device__ explicit Corners(int lane)
      : down_first_row((lane & 7) + (lane >> 3 & 1) * 8),
        down_first_piece(lane >> 4),
        right_first_row((lane & 7) + (lane >> 4) * 8),
        right_first_piece(lane >> 3 & 1) {}
};

// Where a thread's elements are. Tokens 8 n + 2 t and the next, n = 0..3, are counted from `token`.
struct GradientPlace {
  int warp, lane, g, t;
  int side;     // 0: tokens 0-31, 1: 32-63
  int token;    // 2 t of this side
  int channel;  // and channel + 8
  Corners corners;
  uint32_t smem;
  uint32_t own;     // this warp's channels of its first 16 tokens, of a tile
  uint32_t alphas;  // exp(g) of the first n-tile
  uint32_t around;  // kAround of the first n-tile; 64 bytes on, that of the second channel
  static constexpr int kSixteen = 16 * 128;  // bytes from 16 rows of a tile to the next

  __device__ __forceinline__ explicit GradientPlace(uint32_t smem_, int tid = ThreadIndex())
      : warp(tid >> 5 & 7),
        lane(tid & 31),
        g(lane >> 2),
        t(lane & 3),
        side(tid >> 8),
        token(side * 32 + 2 * t),
        channel(warp * 16 + g),
        corners(lane),
        smem(smem_),
        own((warp >> 2) * kHalfTile + Column() + side * 2 * kSixteen),
        alphas(smem + GradientsConfig::kAlpha + tid * 16),
        around(smem + GradientsConfig::kAround + (side * kHead + channel) * 8) {}

  __device__ __forceinline__ uint32_t Column() const {
    return Swizzled(corners.right_first_row, (warp & 3) * 2 + corners.right_first_piece);
  }
  __device__ __forceinline__ uint32_t Alphas(int n) const {
    return alphas + n * (kGradientThreads * 16);
  }
  __device__ __forceinline__ float2 Around(int n, int c) const {
    return LdsF32x2(around + n * 2 * kHead * 8 + c * 64);
  }
  // Of what the sides exchange, this warp's operand of 16 tokens.
  __device__ __forceinline__ uint32_t Exchanged(int operand, int I) const {
    return smem + operand + ((warp * 2 + I) * 32 + lane) * 16;
  }
  // 16x16 block (I, J) of dAqk or dAkk: pieces are xored, rows added. Its right operand is that of
  // a product with the transposed block; for LdmatrixTrans, with the block itself.
  __device__ __forceinline__ uint32_t Block(int matrix, int I, int J) const {
    return smem + matrix +
           (Swizzled(corners.right_first_row, corners.right_first_piece) ^ (J << 5)) + I * kSixteen;
  }
  __device__ __forceinline__ uint32_t BlockForTrans(int matrix, int I, int J) const {
    return smem + matrix + (Swizzled(corners.down_first_row, corners.down_first_piece) ^ (J << 5)) +
           I * kSixteen;
  }
};

// Decays within blocks of 2, 4 or 8 tokens (1 << log_block), from exp(g) of a lane's two tokens and
// channels.
struct Decays {
  float from[4];  // from the block's start to the token, inclusive
  float to[4];    // after the token to the block's end
  float all[2];   // over the block, by channel

  __device__ __forceinline__ Decays(uint32_t alphas, int t, int log_block) {
    const float4 alpha = LdsF32x4(alphas);
    const float a[4] = {alpha.x, alpha.y, alpha.z, alpha.w};
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const float both = a[2 * c] * a[2 * c + 1];
      from[2 * c] = a[2 * c];
      from[2 * c + 1] = both;
      to[2 * c] = a[2 * c + 1];
      to[2 * c + 1] = 1.f;
      all[c] = both;
    }
    if (log_block > 1) Double(1, t);
    if (log_block > 2) Double(2, t);
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

// Decays at level 32 of n-tile n: to the side's end, or from its start.
__device__ __forceinline__ void DecaysOf32(float (&f)[4], const GradientPlace& at, int n) {
  const Decays decays(at.Alphas(n), at.t, 3);
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    const float2 around = at.Around(n, c);
    f[2 * c] = at.side ? decays.from[2 * c] * around.x : decays.to[2 * c] * around.y;
    f[2 * c + 1] = at.side ? decays.from[2 * c + 1] * around.x : decays.to[2 * c + 1] * around.y;
  }
}

// What the other side takes from this one: its operands of level 32, and the decay over it.
template <typename Type>
__device__ __forceinline__ void ExchangeOperands(uint32_t smem) {
  using C = GradientsConfig;
  const GradientPlace at(smem);
  {
    float eight[4][2];  // decays over eight tokens
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const Decays decays(at.Alphas(n), at.t, 3);
      eight[n][0] = decays.all[0];
      eight[n][1] = decays.all[1];
    }
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      if (at.t == 0) {
        const float first = eight[0][c] * eight[1][c], last = eight[2][c] * eight[3][c];
        StsF32(smem + C::kTotals + (at.side * kHead + at.channel + 8 * c) * 4, first * last);
        auto store = [&](int n, float before, float after) {
          StsF32x2(at.around + n * 2 * kHead * 8 + c * 64, before, after);
        };
        store(0, 1.f, eight[1][c] * last);
        store(1, eight[0][c], last);
        store(2, first, eight[3][c]);
        store(3, first * eight[2][c], 1.f);
      }
    }
    __syncwarp();
  }
#pragma unroll
  for (int I = 0; I < 2; ++I) {
    uint32_t q[4], k[4], qf[2][2], kf[2][2];
    LdmatrixTrans(q, smem + C::kQ + at.own + I * 16 * 128);
    LdmatrixTrans(k, smem + C::kK + at.own + I * 16 * 128);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float f[4];
      DecaysOf32(f, at, 2 * I + half);
      Decayed<Type>(kf[half], &k[2 * half], f);
      Decayed<Type>(qf[half], &q[2 * half], f);
    }
    Sts128(at.Exchanged(at.side ? C::kUpperK : C::kLowerK, I),
           {kf[0][0], kf[0][1], kf[1][0], kf[1][1]});
    if (at.side) {
      Sts128(at.Exchanged(C::kUpperQ, I), {qf[0][0], qf[0][1], qf[1][0], qf[1][1]});
    }
  }
}

// row_q, row_k and col -> the state's parts of dq, dk and dG; with the pairs i = j, which nothing
// decays. `outside`: what dg of every token gets.
template <typename Type>
__device__ __forceinline__ void AddStateParts(float (&dq)[4][4], float (&dk)[4][4],
                                              float (&dG)[4][4], float (&outside)[2],
                                              uint32_t smem) {
  using C = GradientsConfig;
  const GradientPlace at(smem);
  float other[2];  // decay over the other side
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    other[c] = LdsF32(smem + C::kTotals + ((at.side ^ 1) * kHead + at.channel + 8 * c) * 4);
  }
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    uint32_t q[4], k[4];
    LdmatrixTrans(q, smem + C::kQ + at.own + (n >> 1) * 16 * 128);
    LdmatrixTrans(k, smem + C::kK + at.own + (n >> 1) * 16 * 128);
    const Decays f(at.Alphas(n), at.t, 3);
    const float2 diagonal = LdsF32x2(smem + C::kDiagonal + (at.token + 8 * n) * 4);
    float before[2], after[2];
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const float2 around = at.Around(n, c);
      before[c] = at.side ? around.x * other[c] : around.x;
      after[c] = at.side ? around.y : around.y * other[c];
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int c = i >> 1;
      const float2 q_pair = Unpack<Type>(q[(n & 1) * 2 + c]),
                   k_pair = Unpack<Type>(k[(n & 1) * 2 + c]);
      const float qi = i & 1 ? q_pair.y : q_pair.x, ki = i & 1 ? k_pair.y : k_pair.x;
      const float d = i & 1 ? diagonal.y : diagonal.x;
      const float from = f.from[i] * before[c], to = f.to[i] * after[c];
      const float read_q = dq[n][i] * from, read_k = dk[n][i] * from, written = dG[n][i] * to;
      const float kept = ki * written;
      outside[c] += kept;
      dG[n][i] = fmaf(qi, read_q, fmaf(ki, read_k, -kept));
      dq[n][i] = fmaf(d, ki, read_q);
      dk[n][i] = fmaf(d, qi, read_k + written);
    }
  }
}

// Level 32: pairs of the two sides.
__device__ __forceinline__ void AddPairsOfSides(float (&dq)[4][4], float (&dk)[4][4],
                                                float (&dG)[4][4], uint32_t smem) {
  using C = GradientsConfig;
  const GradientPlace at(smem);
  const bool is_upper = at.side;
#pragma unroll
  for (int I = 0; I < 2; ++I) {
    __syncwarp();
    float sum_q[2][4] = {}, sum_k[2][4] = {};
#pragma unroll
    for (int J = 0; J < 2; ++J) {
      const int own = 2 * at.side + I, other = 2 * (at.side ^ 1) + J;
      const uint4 k = Lds128(at.Exchanged(is_upper ? C::kLowerK : C::kUpperK, J));
      const uint32_t k_left[4] = {k.x, k.y, k.z, k.w};
      uint32_t x[4];
      Ldmatrix(x, at.Block(C::kDAkk, own, other));
      Mma<Bf16>(sum_k[0], k_left, x[0], x[1]);
      Mma<Bf16>(sum_k[1], k_left, x[2], x[3]);
      if (is_upper) {
        Ldmatrix(x, at.Block(C::kDAqk, own, other));
        Mma<Bf16>(sum_q[0], k_left, x[0], x[1]);
        Mma<Bf16>(sum_q[1], k_left, x[2], x[3]);
      } else {
        const uint4 q = Lds128(at.Exchanged(C::kUpperQ, J));
        const uint32_t q_left[4] = {q.x, q.y, q.z, q.w};
        LdmatrixTrans(x, at.BlockForTrans(C::kDAqk, other, own));
        Mma<Bf16>(sum_k[0], q_left, x[0], x[1]);
        Mma<Bf16>(sum_k[1], q_left, x[2], x[3]);
      }
    }
    const uint4 k = Lds128(at.Exchanged(is_upper ? C::kUpperK : C::kLowerK, I));
    const uint4 q = is_upper ? Lds128(at.Exchanged(C::kUpperQ, I)) : uint4{0, 0, 0, 0};
    const uint32_t kf[2][2] = {{k.x, k.y}, {k.z, k.w}}, qf[2][2] = {{q.x, q.y}, {q.z, q.w}};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int n = 2 * I + half;
      float f[4];
      DecaysOf32(f, at, n);
      AddLevel(dq[n], dk[n], dG[n], sum_q[half], sum_k[half], f, qf[half], kf[half],
               is_upper ? 1.f : -1.f);
    }
  }
}

// Decays at level 16 of n-tile n: to the end of the side's first 16 tokens, or from the start of
// the second.
__device__ __forceinline__ void DecaysOf16(float (&f)[4], const GradientPlace& at, int n) {
  const Decays decays(at.Alphas(n), at.t, 3);
#pragma unroll
  for (int i = 0; i < 4; ++i) f[i] = n < 2 ? decays.to[i] : decays.from[i];
  if (n == 1 || n == 2) return;
  const Decays between(at.Alphas(n == 0 ? 1 : 2), at.t, 3);
#pragma unroll
  for (int i = 0; i < 4; ++i) f[i] *= between.all[i >> 1];
}

// Level 16: pairs of the two 16 tokens of a side.
template <typename Type>
__device__ __forceinline__ void AddPairsOf16(float (&dq)[4][4], float (&dk)[4][4],
                                             float (&dG)[4][4], uint32_t smem) {
  using C = GradientsConfig;
  const GradientPlace at(smem);
  uint32_t q[4], k[4], qf[2][2], kf[2][2][2];
  LdmatrixTrans(q, smem + C::kQ + at.own + 16 * 128);
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    if ((n & 1) == 0) LdmatrixTrans(k, smem + C::kK + at.own + (n >> 1) * 16 * 128);
    float f[4];
    DecaysOf16(f, at, n);
    Decayed<Type>(kf[n >> 1][n & 1], &k[2 * (n & 1)], f);
    if (n >= 2) Decayed<Type>(qf[n & 1], &q[2 * (n & 1)], f);
  }
#pragma unroll
  for (int I = 0; I < 2; ++I) {
    __syncwarp();
    const int own = 2 * at.side + I, other = 2 * at.side + (I ^ 1);
    const uint32_t (&kJ)[2][2] = kf[I ^ 1];
    const uint32_t k_left[4] = {kJ[0][0], kJ[0][1], kJ[1][0], kJ[1][1]};
    float sum_q[2][4] = {}, sum_k[2][4] = {};
    uint32_t x[4];
    Ldmatrix(x, at.Block(C::kDAkk, own, other));
    Mma<Bf16>(sum_k[0], k_left, x[0], x[1]);
    Mma<Bf16>(sum_k[1], k_left, x[2], x[3]);
    if (I == 1) {
      Ldmatrix(x, at.Block(C::kDAqk, own, other));
      Mma<Bf16>(sum_q[0], k_left, x[0], x[1]);
      Mma<Bf16>(sum_q[1], k_left, x[2], x[3]);
    } else {
      const uint32_t q_left[4] = {qf[0][0], qf[0][1], qf[1][0], qf[1][1]};
      LdmatrixTrans(x, at.BlockForTrans(C::kDAqk, other, own));
      Mma<Bf16>(sum_k[0], q_left, x[0], x[1]);
      Mma<Bf16>(sum_k[1], q_left, x[2], x[3]);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int n = 2 * I + half;
      float f[4];
      DecaysOf16(f, at, n);
      AddLevel(dq[n], dk[n], dG[n], sum_q[half], sum_k[half], f, qf[half], kf[I][half],
               I == 1 ? 1.f : -1.f);
    }
  }
}

// Levels 8, 4, 2 and 1. At the last three a pair of 8 tokens is of a level if that is the highest
// bit of its places, xored.
template <typename Type>
__device__ __forceinline__ void AddPairsWithin(float (&dq)[4][4], float (&dk)[4][4],
                                               float (&dG)[4][4], uint32_t smem) {
  using C = GradientsConfig;
  const GradientPlace at(smem);
  const bool of_4 = (at.g >> 2) != (at.t >> 1), of_2 = !of_4 && (at.g >> 1 & 1) != (at.t & 1);
  const uint32_t masks[3] = {of_4 || of_2 ? 0u : ~0u, of_2 ? ~0u : 0u, of_4 ? ~0u : 0u};
#pragma unroll
  for (int I = 0; I < 2; ++I) {
    __syncwarp();
    const int of_all = 2 * at.side + I;
    uint32_t by_row[4], by_column[4], keys[4];
    Ldmatrix(by_row, at.Block(C::kDAqk, of_all, of_all));
    LdmatrixTrans(by_column, at.BlockForTrans(C::kDAqk, of_all, of_all));
    Ldmatrix(keys, at.Block(C::kDAkk, of_all, of_all));
    uint32_t q[4], k[4];
    LdmatrixTrans(q, smem + C::kQ + at.own + I * 16 * 128);
    LdmatrixTrans(k, smem + C::kK + at.own + I * 16 * 128);
    float f[2][4];
    uint32_t qf[2][2], kf[2][2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int n = 2 * I + half;
      Decays decays(at.Alphas(n), at.t, 1);
#pragma unroll
      for (int level = 0; level < 3; ++level) {  // of 1 << level tokens
        bool is_upper = at.t & (level == 2 ? 2 : 1);
        if (level == 0) {
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            f[half][2 * c] = 1.f;
            f[half][2 * c + 1] = decays.to[2 * c];  // exp(g) of the second token
          }
        } else {
          if (level == 2) decays.Double(1, at.t);
#pragma unroll
          for (int i = 0; i < 4; ++i) f[half][i] = is_upper ? decays.from[i] : decays.to[i];
        }
        Decayed<Type>(qf[half], &q[2 * half], f[half]);
        Decayed<Type>(kf[half], &k[2 * half], f[half]);
        float sum_q[4] = {}, sum_k[4] = {};
        const uint32_t mask = masks[level];
        MmaK8(sum_q, kf[half][0], kf[half][1], by_row[3 * half] & mask);
        MmaK8(sum_k, kf[half][0], kf[half][1], keys[3 * half] & mask);
        MmaK8(sum_k, qf[half][0], qf[half][1], by_column[3 * half] & mask);
        if (level == 0) {  // a lane has one token of either kind
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            kf[half][c] ^= 0x00008000u;
          }
          AddLevel(dq[n], dk[n], dG[n], sum_q, sum_k, f[half], qf[half], kf[half], 1.f);
        } else {
          AddLevel(dq[n], dk[n], dG[n], sum_q, sum_k, f[half], qf[half], kf[half],
                   is_upper ? 1.f : -1.f);
        }
      }
      decays.Double(2, at.t);
#pragma unroll
      for (int i = 0; i < 4; ++i) f[half][i] = half == 1 ? decays.from[i] : decays.to[i];
      Decayed<Type>(qf[half], &q[2 * half], f[half]);
      Decayed<Type>(kf[half], &k[2 * half], f[half]);
    }
    float sum_q[2][4] = {}, sum_k[2][4] = {};
    MmaK8(sum_q[1], kf[0][0], kf[0][1], by_row[2]);
    MmaK8(sum_k[1], kf[0][0], kf[0][1], keys[2]);
    MmaK8(sum_k[0], kf[1][0], kf[1][1], keys[1]);
    MmaK8(sum_k[0], qf[1][0], qf[1][1], by_column[1]);
    AddLevel(dq[2 * I], dk[2 * I], dG[2 * I], sum_q[0], sum_k[0], f[0], qf[0], kf[0], -1.f);
    AddLevel(dq[2 * I + 1], dk[2 * I + 1], dG[2 * I + 1], sum_q[1], sum_k[1], f[1], qf[1], kf[1],
             1.f);
  }
}

}  // namespace jax_kda::sm90
