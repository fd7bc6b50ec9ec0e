// The kernels for AVX-512. The set is chosen for this file's own functions by a pragma, after the
// headers of others: inline functions of the standard library, which the linker shares with all
// files, keep the default set.
#if defined(__x86_64__)

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#if defined(__clang__)
#pragma clang attribute push( \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")
#endif

#include "ffi/cpu/chunk.h"
#include "ffi/cpu/chunk_grad.h"
#include "ffi/cpu/kernels.h"
#include "ffi/cpu/recurrent.h"
#include "ffi/cpu/tile.h"

namespace jax_kda::cpu {

// constexpr: no code of this file runs before the choice.
constexpr Kernels kAvx512 = {"avx512", MakeChunkKernel<Isa<16, 8>>(),
                             MakeChunkGradKernel<Isa<16, 8>>(), MakeRecurrentKernel<Isa<16, 8>>()};

}  // namespace jax_kda::cpu

#if defined(__clang__)
#pragma clang attribute pop
#endif

#endif  // __x86_64__
