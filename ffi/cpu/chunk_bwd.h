#pragma once

#include "ffi/common/params.h"
#include "ffi/cpu/kernels.h"
#include "ffi/cpu/parallel.h"
#include "xla/ffi/api/ffi.h"

namespace jax_kda::cpu {

// The gradient of the chunked forward on `executor`, with the given kernel. Checks the offsets
// before any work.
::xla::ffi::Error ChunkBwd(const BwdParams& b, const ChunkGradKernel& kernel,
                           const Executor& executor);

}  // namespace jax_kda::cpu
