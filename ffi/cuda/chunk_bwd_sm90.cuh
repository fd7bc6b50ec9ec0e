// What the kernels of the Hopper gradient share: the record of a chunk, the workspace.
//
//   plan, prepare  those of the forward       q k g beta -> images, of the kind for the gradient
//   scan           (sequence, value head) twice, independent of each other:
//                    states    forwards   images, v, initial_state -> S entering, e of every chunk
//                    reverse   backwards  images, do, dfinal_state -> dS leaving, y of every chunk;
//                                         dv, dinitial_state
//   gradients      (chunk, query/key head)    q k g do, records -> dq dk dg dbeta, parameter sums
//   sums           (row, value head)          parameter sums -> dA_log ddt_bias
//
// Where chains are few and long, both scans are cut into segments as the forward's is: summarise
// makes S T + C and dS T^T + C' of each, combine the states between them, and the scans start
// there.
//
// e, y and what they are good for stand in docs/math.md under "The gradient", why e is two numbers
// of bf16, e and e_low, in docs/kernels.md under "Errors".
#pragma once

#include <cstdint>

#include "../common/params.h"
#include "chunk_fwd_sm90.cuh"

namespace jax_kda::sm90 {

// What the scans leave of one chunk and value head, bf16, in the layout of image tiles.
namespace record {
inline constexpr int kStateTile = kHead * kHead * 2;  // two halves of 64 channels, 128 V rows each
inline constexpr int kStateHalf = kStateTile / 2;
inline constexpr int kState = 0;            // [V, K]  S entering
inline constexpr int kDState = kStateTile;  // [V, K]  dS leaving
inline constexpr int kE = 2 * kStateTile;   // [64, V]  v_new = diag(beta) e
inline constexpr int kY = kE + kTile;       // [64, V]  dv = diag(beta) y
inline constexpr int kELow = kY + kTile;    // [64, V]  what rounding took from e
inline constexpr int kBytes = kELow + kTile;
}  // namespace record

// What a chunk and value head adds to the gate's parameters: ddt_bias [2, K] of either half of its
// tokens, dA_log of 16 warps.
inline constexpr int kParameterSums = 2 * kHead + 16;
// Blocks of the gradients kernel, one an SM. With grouped value heads each keeps
// the sums of dq and dk of its chunk between heads: 32 numbers a thread.
inline constexpr int kGradientBlocks = kSms, kGradientThreads = 512, kGroupSums = 32;

struct BwdWorkspace {
  // Images of gradient_image::kBytes. Where scans are cut, segment_states and transitions are twice
  // as many: those of the reverse scan come second, its transitions being the others transposed.
  Workspace fwd;
  std::byte* records;     // [NT, HV, record::kBytes]
  float* parameter_sums;  // [NT, HV, kParameterSums]
  float* group_sums;      // [kGradientBlocks, kGroupSums, kGradientThreads]; only where HV > H
};

inline int64_t BwdWorkspaceBytes(int64_t B, int64_t T, int64_t H, int64_t HV, int64_t M,
                                 bool packed, int64_t segment_chunks) {
  const int64_t NT = ChunkSlots(B, T, M, packed);
  const int64_t plan =
      packed ? NT * int64_t{sizeof(ChunkSlot)} + B * M * int64_t{sizeof(SequenceSlot)} : 0;
  const int64_t group = HV > H ? int64_t{kGradientBlocks} * kGroupSums * kGradientThreads * 4 : 0;
  return NT * HV * (gradient_image::kBytes + record::kBytes + kParameterSums * 4) + plan + group +
         Segments(B, T, M, packed, segment_chunks) * HV * 4 * kState + 256;
}

}  // namespace jax_kda::sm90
