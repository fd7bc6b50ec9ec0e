// The FFI handlers of the CPU platform.
#include "ffi/cpu/handlers.h"

#include "ffi/common/check.h"
#include "ffi/cpu/chunk_fwd.h"
#include "xla/ffi/api/ffi.h"

namespace jax_kda::cpu {
namespace {

constexpr int64_t kMaxHeadSize = 256;

ffi::Error ChunkFwdImpl(ffi::ThreadPool pool, FwdAttrs attrs, ffi::RemainingArgs args,
                        ffi::RemainingRets rets) {
  const auto params = MakeFwdParams(attrs, args, rets, Workspace::kNone);
  RETURN_IF_ERROR(params);
  if (params->K > kMaxHeadSize || params->V > kMaxHeadSize) {
    return ffi::Error(ffi::ErrorCode::kUnimplemented,
                      "head sizes K, V must be at most 256; got " + std::to_string(params->K) +
                          ", " + std::to_string(params->V) +
                          " (implementation=\"reference\" has no limit)");
  }
  const Executor executor{pool.num_threads(),
                          [&pool](std::function<void()> task) { pool.Schedule(std::move(task)); }};
  return ChunkFwd(*params, *ChunkKernels().front(), executor);
}

}  // namespace
}  // namespace jax_kda::cpu

// args: q, k [..., T, H, K]; v [..., T, HV, V]; g [..., T, HV, K]; beta [..., T, HV]; [A_log];
// [dt_bias]; [offsets];
//       [initial_state [..., N, HV, V, K]]; then operands aliased to results. rets: o [..., T, HV,
//       V]; [final_state].
XLA_FFI_DEFINE_HANDLER_SYMBOL(KdaChunkFwd, jax_kda::cpu::ChunkFwdImpl,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Attrs<jax_kda::FwdAttrs>()
                                  .RemainingArgs()
                                  .RemainingRets());
