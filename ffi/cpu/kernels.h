// The kernels of chunk.h, chunk_grad.h and recurrent.h, compiled for each instruction set. This
// header and its users know nothing of the sets.
#pragma once

#include <cstdint>
#include <vector>

#include "ffi/common/params.h"

namespace jax_kda::cpu {

// The tokens [token, token + count) of row b and value head hv.
struct HeadTokens {
  int64_t b, hv, token, count;
};

// Sizes are in floats; every buffer is aligned to 64 bytes.
struct ChunkKernel {
  int64_t strip;  // V columns that one call of `scan` moves

  int64_t (*prepared_size)(const FwdParams& p);
  int64_t (*prepare_scratch_size)(const FwdParams& p);
  int64_t (*scan_scratch_size)(const FwdParams& p);
  int64_t (*state_rows)(const FwdParams& p);  // K, padded

  // 1 <= x.count <= kChunk
  void (*prepare)(const FwdParams& p, const HeadTokens& x, float* prepared, float* scratch);

  // S: [state_rows, strip], columns [column, column + strip) of V; those past V are zero.
  void (*scan)(const FwdParams& p, const HeadTokens& x, float* prepared, int64_t column, float* S,
               float* scratch);
};

// Where the gradients of one chunk and value head go that are not results of their own.
struct ChunkGradients {
  float* dq;         // [kChunk, state_rows]  by the scaled and normalised q
  float* dk;         // [kChunk, state_rows]  by the normalised k
  bool first, last;  // of the value heads that share dq and dk: begins the sums, writes results
  double* dA_log;    // [1]  += ; nullptr: not wanted
  double* ddt_bias;  // [K]  += ; nullptr: not wanted
};

// The gradient, chunk by chunk: `forward` through a sequence, then `backward` from its end. States
// are strips [strips(p), state_rows, strip] as for ChunkKernel.
struct ChunkGradKernel {
  int64_t strip;

  int64_t (*kept_size)(const FwdParams& p);     // what `backward` needs from `forward`
  int64_t (*scratch_size)(const FwdParams& p);  // zeros before the first call
  int64_t (*state_rows)(const FwdParams& p);    // K, padded

  // S over the chunk; `kept` may be nullptr.
  void (*forward)(const FwdParams& p, const HeadTokens& x, float* S, float* kept, float* scratch);

  // dS, the cotangent of the state, back over the chunk. Writes dv, dg, dbeta and, after the last
  // head of a group, dq and dk.
  void (*backward)(const BwdParams& b, const HeadTokens& x, const float* kept, float* dS,
                   const ChunkGradients& to, float* scratch);
};

// Rows [row, row + rows) of V of one head's state. Each row is computed in the same way whatever
// the others are, as long as `row` is a multiple of `tile`.
struct StateRows {
  int64_t row, rows;
};

struct RecurrentKernel {
  int64_t tile;
  int64_t tokens;  // at most, in one call

  int64_t (*scratch_size)(const FwdParams& p);
  int64_t (*row_size)(const FwdParams& p);  // K, padded

  // A head's state [V, K] in memory <-> its rows in S, [rows, row_size], zero beyond K. `from` is
  // nullptr for zeros.
  void (*load)(const FwdParams& p, const StateRows& y, const void* from, float* S);
  void (*store)(const FwdParams& p, const StateRows& y, const float* S, void* to);

  // Activates the tokens, for all rows.
  void (*prepare)(const FwdParams& p, const HeadTokens& x, float* scratch);

  // Moves the rows over the prepared tokens and writes their o. `from` and `to` are [rows,
  // row_size], need no alignment and can be the same.
  void (*move)(const FwdParams& p, const HeadTokens& x, const StateRows& y, const float* from,
               float* to, float* scratch);
};

struct Kernels {
  const char* name;
  ChunkKernel chunk;
  ChunkGradKernel chunk_grad;
  RecurrentKernel recurrent;
};

extern const Kernels kBaseline;
extern const Kernels kAvx2;    // x86-64 only
extern const Kernels kAvx512;  // x86-64 only

// Those that this machine can run, the fastest first.
const std::vector<const Kernels*>& SupportedKernels();

}  // namespace jax_kda::cpu
