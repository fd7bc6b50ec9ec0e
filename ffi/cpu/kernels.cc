// Which of the compiled kernels this machine runs. Not `target_clones`: the register tile has to
// follow the instruction set, GCC splits vectors of an inlined function before it clones, and
// clones need ifuncs, which musl and macOS lack.
#include "ffi/cpu/kernels.h"

namespace jax_kda::cpu {
namespace {

std::vector<const Kernels*> Supported() {
  std::vector<const Kernels*> kernels;
#if defined(__x86_64__)
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    kernels.push_back(&kAvx512);
  }
  if (avx2) kernels.push_back(&kAvx2);
#endif
  kernels.push_back(&kBaseline);
  return kernels;
}

}  // namespace

const std::vector<const Kernels*>& SupportedKernels() {
  static const std::vector<const Kernels*> kernels = Supported();
  return kernels;
}

}  // namespace jax_kda::cpu
