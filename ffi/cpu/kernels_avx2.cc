// The kernels for AVX2 and FMA. The set is chosen for this file's own functions by a pragma, after
// the headers of others: inline functions of the standard library, which the linker shares with all
// files, keep the default set.
#if defined(__x86_64__)

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC target("avx2,fma")
#endif

#include "ffi/cpu/chunk.h"
#include "ffi/cpu/chunk_grad.h"
#include "ffi/cpu/kernels.h"
#include "ffi/cpu/recurrent.h"
#include "ffi/cpu/tile.h"

namespace jax_kda::cpu {

// constexpr: no code of this file runs before the choice.
constexpr Kernels kAvx2 = {"avx2", MakeChunkKernel<Isa<8, 4>>(), MakeChunkGradKernel<Isa<8, 4>>(),
                           MakeRecurrentKernel<Isa<8, 4>>()};

}  // namespace jax_kda::cpu

#if defined(__clang__)
#pragma clang attribute pop
#endif

#endif  // __x86_64__
