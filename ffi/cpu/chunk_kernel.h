// The kernel of chunk.h, compiled for each instruction set. This header and its users know nothing
// of the sets.
#pragma once

#include <cstdint>
#include <vector>

#include "ffi/common/params.h"

namespace jax_kda::cpu {

// The tokens [token, token + count) of row b and value head hv, 1 <= count <= kChunk.
struct ChunkTokens {
  int64_t b, hv, token, count;
};

struct ChunkKernel {
  const char* name;
  int64_t strip;  // V columns that one call of `scan` moves

  // Sizes in floats; every buffer is aligned to 64 bytes.
  int64_t (*prepared_size)(const FwdParams& p);
  int64_t (*prepare_scratch_size)(const FwdParams& p);
  int64_t (*scan_scratch_size)(const FwdParams& p);
  int64_t (*state_rows)(const FwdParams& p);  // K, padded

  void (*prepare)(const FwdParams& p, const ChunkTokens& x, float* prepared, float* scratch);

  // S: [state_rows, strip], columns [column, column + strip) of V; those past V are zero.
  void (*scan)(const FwdParams& p, const ChunkTokens& x, float* prepared, int64_t column, float* S,
               float* scratch);
};

extern const ChunkKernel kChunkBaseline;
extern const ChunkKernel kChunkAvx2;    // x86-64 only
extern const ChunkKernel kChunkAvx512;  // x86-64 only

// Those that this machine can run, the fastest first.
const std::vector<const ChunkKernel*>& ChunkKernels();

}  // namespace jax_kda::cpu
