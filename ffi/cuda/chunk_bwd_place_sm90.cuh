// Where the gradients kernel has what of a chunk: its shared memory, and the elements of a thread.
//
// A warp owns 16 channels of 32 tokens, one side of the chunk, and everything is held transposed,
// [channels, tokens]: then a lane has the same elements of accumulators and of left operands, of
// two channels (g and g + 8) the tokens 8 n + 2 t and 8 n + 2 t + 1. Warps share the 64x64 matrices
// and the norms, and the two sides of the same channels their operands.
#pragma once

#include "chunk_bwd_sm90.cuh"

namespace jax_kda::sm90 {

struct GradientsConfig {
  static constexpr int kThreads = kGradientThreads;
  // A row of fp32 g; the 16 put the rows of a lane's neighbours on different banks.
  static constexpr int kWideRow = kHead * 4 + 16;

  // Shared memory, bytes. The record: do e y e_low are one load, S and dS the other.
  static constexpr int kDo = 0, kE = kTile, kY = 2 * kTile;
  static constexpr int kState = 3 * kTile, kDState = kState + record::kStateTile;
  static constexpr int kDAqk = kDState + record::kStateTile;  // [64, 64], strictly lower
  static constexpr int kDAkk = kDAqk + kMatrix;               // [64, 64], strictly lower
  static constexpr int kELow = kDAqk;  // in their place until the products are done
  static_assert(2 * kMatrix == kTile);
  // In the place of do, e and y from the products to the next load: operands of 16 tokens and
  // channels, as registers hold them.
  static constexpr int kQHead = kDo, kKHead = kE, kKTail = kY;
  static constexpr int kNorms = kDAkk + kMatrix;             // [128] fp32: 1 / norm of q, of k
  static constexpr int kDiagonal = kNorms + 2 * kChunk * 4;  // [64] fp32 of dAqk
  static constexpr int kDecay = kDiagonal + kChunk * 4, kBeta = kDecay + kHead * 4;
  static constexpr int kSides = kBeta + kChunk * 4;       // [2, K] fp32
  static constexpr int kStrong = kSides + 2 * kHead * 4;  // [16] a warp's
  static constexpr int kValuesFull = kStrong + 64, kStatesFull = kValuesFull + 8;
  static constexpr int kQueriesFull = kStatesFull + 8, kInputsFull = kQueriesFull + 8;  // [2]
  static constexpr int kSteps = kInputsFull + 16;  // this one and the next: [2] of 64 bytes
  static constexpr int kZero = kSteps + 128;       // a 0 that the compiler cannot see
  // q, k and g, where dq, dk and dg take their places. Rows of fp32 are too many for two stages.
  static constexpr int kInputs = (kZero + 4 + 1023) / 1024 * 1024;
  static constexpr int kStageBytes = 3 * kTile;
  template <typename G>
  static constexpr int kStages = sizeof(G) == 2 ? 2 : 1;
  static constexpr int kQ = 0, kK = kTile, kG = 2 * kTile;  // of a stage
  static constexpr int kBytes = kInputs + 2 * kStageBytes;
  static constexpr int kSpare = kG + kChunk * kWideRow;  // where there is one stage: [kTile]
  static_assert(kSpare + kTile <= 2 * kStageBytes);
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
  uint32_t own;  // this warp's channels of its first 16 tokens, of a tile
  static constexpr int kSixteen = 16 * 128;  // bytes from 16 rows of a tile to the next

  // Worked out anew rather than held from far above, whatever ptxas makes of it.
  __device__ __forceinline__ explicit GradientPlace(uint32_t smem_)
      : GradientPlace(smem_, ThreadIndex() + Lds32(smem_ + GradientsConfig::kZero)) {}
  __device__ __forceinline__ explicit GradientPlace(uint32_t smem_, int tid)
      : warp(tid >> 5 & 7),
        lane(tid & 31),
        g(lane >> 2),
        t(lane & 3),
        side(tid >> 8),
        token(side * 32 + 2 * t),
        channel(warp * 16 + g),
        corners(lane),
        smem(smem_),
        own((warp >> 2) * kHalfTile + Column() + side * 2 * kSixteen) {}

  __device__ __forceinline__ uint32_t Column() const {
    return Swizzled(corners.right_first_row, (warp & 3) * 2 + corners.right_first_piece);
  }
  // These channels' operand of block I (0..3).
  __device__ __forceinline__ uint32_t Operand(int operand, int I) const {
    return smem + operand + (I >> 1) * (kTile / 2) + ((warp * 2 + (I & 1)) * 32 + lane) * 16;
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
  __device__ __forceinline__ uint32_t SideAt(int of_side) const {
    return smem + GradientsConfig::kSides + (of_side * kHead + channel) * 4;
  }
  // The quarters of dAqk and dAkk above the diagonal are nobody's; these channels have 512 bytes of
  // them: the log decay over the 8 tokens of n-tile n (0..7), for channel g, or + 8 at this ^ 32;
  // and after both of the pair of warps have read it, of this side's block I the decay to the
  // chunk's end.
  __device__ __forceinline__ uint32_t EightAt(int n) const {
    return smem + GradientsConfig::kDAqk + (n >> 2) * kMatrix + (n & 3) * 1024 +
           Swizzled(warp, 4 + (g >> 2)) + (g & 3) * 4;
  }
  __device__ __forceinline__ uint32_t EndAt(int I) const { return EightAt(4 * side + I); }
  // Where the next chunk's q comes at last, or behind the wide rows: what rounding of k_tail leaves
  // out of the products with dS, of n-tile n; then what a warp adds to the dots of 32 tokens.
  template <typename G>
  __device__ __forceinline__ uint32_t RestAt(uint32_t in, int n) const {
    return Spare<G>(in) + (n * 16 + side * 8 + warp) * 256 + lane * 8;
  }
  template <typename G>
  __device__ __forceinline__ uint32_t DotsAt(uint32_t in, int of_warp) const {
    return Spare<G>(in) + (side * 8 + of_warp) * 256 + lane * 8;
  }
  template <typename G>
  __device__ __forceinline__ uint32_t Spare(uint32_t in) const {
    using C = GradientsConfig;
    const uint32_t other = 2 * (smem + C::kInputs) + C::kStageBytes - in;
    return C::kStages<G> == 2 ? other + C::kQ : in + C::kSpare;
  }
};

}  // namespace jax_kda::sm90
