// The kernel for whatever the compiler targets by default: SSE2 on x86-64, NEON on 64-bit Arm.
#include "ffi/cpu/chunk.h"

namespace jax_kda::cpu {

constexpr ChunkKernel kChunkBaseline = MakeKernel<Isa<4, 4>>("baseline");

}  // namespace jax_kda::cpu
