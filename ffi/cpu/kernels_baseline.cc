// The kernels for whatever the compiler targets by default: SSE2 on x86-64, NEON on 64-bit Arm.
#include "ffi/cpu/chunk.h"
#include "ffi/cpu/chunk_grad.h"
#include "ffi/cpu/kernels.h"
#include "ffi/cpu/recurrent.h"
#include "ffi/cpu/tile.h"

namespace jax_kda::cpu {

constexpr Kernels kBaseline = {"baseline", MakeChunkKernel<Isa<4, 4>>(),
                               MakeChunkGradKernel<Isa<4, 4>>(), MakeRecurrentKernel<Isa<4, 4>>()};

}  // namespace jax_kda::cpu
