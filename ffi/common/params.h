// The contract between the host checks (check.h) and the kernels: one call, as sizes, flags and
// raw pointers. `kda_chunk_fwd` and `kda_recurrent_fwd` are the same function of it.
//
// XLA buffers are dense and row-major, so shapes are all the layout there is. Leading batch axes
// (vmap prepends them) are collapsed into B. Names are those of the mathematics: docs/math.md and
// jax_kda/reference.py.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace jax_kda {

inline constexpr int kChunk = 64;  // C: tokens a chunk, on every platform

enum class DType : int32_t { kBF16, kF32 };

// How `g` becomes the log decay. The values are the `gate` attribute of the FFI call.
enum class Gate : int32_t {
  kActivated = 0,   // g is the log decay already
  kSoftplus = 1,    // -exp(A_log) softplus(g + dt_bias)
  kLowerBound = 2,  // lower_bound sigmoid(exp(A_log) (g + dt_bias))
};

// How `beta` becomes the write strength. The values are the `beta_mode` attribute of the FFI call.
enum class BetaMode : int32_t {
  kProbability = 0,  // as given
  kSigmoid = 1,      // sigmoid(beta)
  kTwoSigmoid = 2,   // 2 sigmoid(beta): allow_neg_eigval
};

struct FwdParams {
  int64_t B;   // rows of tokens
  int64_t T;   // tokens a row
  int64_t H;   // query/key heads
  int64_t HV;  // value heads, a multiple of H; value head i reads query/key head i / (HV / H)
  int64_t K;   // key head size
  int64_t V;   // value head size
  int64_t M;   // sequences a row, 1 when rows are not packed; there are N = B M states

  float scale;
  float lower_bound;  // used by Gate::kLowerBound
  Gate gate;
  BetaMode beta_mode;
  bool l2norm;  // normalise q and k over K

  DType dtype;        // of q, k, v and o
  DType g_dtype;      // of g
  DType beta_dtype;   // of beta
  DType state_dtype;  // of initial_state and final_state

  const void* q;           // [B, T, H, K]
  const void* k;           // [B, T, H, K]
  const void* v;           // [B, T, HV, V]
  const void* g;           // [B, T, HV, K]
  const void* beta;        // [B, T, HV]
  const float* A_log;      // [HV] or [B, HV]; nullptr: zeros
  const float* dt_bias;    // [HV, K] or [B, HV, K]; nullptr: zeros
  int64_t A_log_stride;    // elements from one row of tokens to the next; 0 when shared
  int64_t dt_bias_stride;  // elements from one row of tokens to the next; 0 when shared

  // Where sequences lie in a row. nullptr: every row is one sequence. Values live on the device and
  // are not trusted. Sequence m is, by offsets_step,
  //
  //   1: [B, M + 1]  [offsets[m], offsets[m + 1]), offsets[0] = 0        (cu_seqlens)
  //   2: [B, M, 2]   [offsets[2 m], offsets[2 m + 1]), gaps are allowed  (segment_ids)
  //
  // Tokens outside every sequence get o = 0.
  const int32_t* offsets;
  int64_t offsets_step;

  // Without a pool (pools = 0) state n is sequence n's. The two can be the same memory.
  const void* initial_state;  // [N, HV, V, K]; nullptr: zeros
  void* final_state;          // [N, HV, V, K]; nullptr: not wanted

  // With a pool, both are [pools, slots, HV, V, K], and slots are chosen by index. Values live on
  // the device and are not trusted: an index outside [0, slots) is no slot. Sequence n uses pool
  // n / (N / pools); it
  //
  //   reads    slot state_indices[n]; zeros when there are no state_indices
  //   writes   slot output_state_indices[n], in their absence state_indices[n]; nothing if it is no
  //            slot or there is no final_state
  //   writes   its state after 64 (j + 1) tokens to slot checkpoint_indices[n, j]
  //
  // A sequence whose first index (state_indices, in their absence output_state_indices) is no slot
  // is padding: its tokens get o = 0 and no slot is touched. All other slots of final_state are
  // those of initial_state, which has to be copied first where the two are not the same memory.
  int64_t pools;
  int64_t slots;
  const int32_t* state_indices;         // [N]; nullptr: none
  const int32_t* output_state_indices;  // [N]; nullptr: none
  const int32_t* checkpoint_indices;    // [N, T / 64]; nullptr: none

  // Few and long chains are scanned in segments of this many chunks, whole ones with 0. Only
  // kda_chunk_fwd and kda_chunk_bwd on CUDA look at it.
  int64_t segment_chunks;

  // Rows that are not packed, nor cut, are prepared in slices of this many chunks, each while the
  // one before is scanned; at once with 0. Only kda_chunk_fwd on CUDA looks at it.
  int64_t slice_chunks;

  void* o;               // [B, T, HV, V]
  std::byte* workspace;  // on CUDA, Chunk{Fwd,Bwd}WorkspaceBytes(...); else nullptr
  int64_t workspace_bytes;
};
static_assert(std::is_trivially_copyable_v<FwdParams>);

// `kda_chunk_bwd`: cotangents of the operands from those of the results. Tokens outside every
// sequence get gradients of 0; the state of an empty sequence hands its cotangent through.
struct BwdParams {
  FwdParams fwd;  // the inputs, without a pool, and the workspace; o and final_state are nullptr

  const void* do_;           // [B, T, HV, V], of fwd.dtype
  const void* dfinal_state;  // [N, HV, V, K]; nullptr: zeros
  DType dfinal_state_dtype;

  // Each of the dtype of its primal.
  void* dq;              // [B, T, H, K]; summed over the value heads that share it
  void* dk;              // [B, T, H, K]
  void* dv;              // [B, T, HV, V]
  void* dg;              // [B, T, HV, K]
  void* dbeta;           // [B, T, HV]
  float* dA_log;         // [B, HV], for each row also where A_log is shared; nullptr: not wanted
  float* ddt_bias;       // [B, HV, K], likewise
  void* dinitial_state;  // [N, HV, V, K]; nullptr: there is no initial_state
};
static_assert(std::is_trivially_copyable_v<BwdParams>);

}  // namespace jax_kda
