// The FFI handlers of the CPU platform.
#include "ffi/cpu/handlers.h"

#include "ffi/common/check.h"
#include "ffi/cpu/chunk_fwd.h"
#include "ffi/cpu/kernels.h"
#include "ffi/cpu/recurrent_fwd.h"
#include "xla/ffi/api/ffi.h"

namespace jax_kda::cpu {
namespace {

constexpr int64_t kMaxHeadSize = 256;

ffi::ErrorOr<FwdParams> SupportedParams(const FwdAttrs& attrs, const ffi::RemainingArgs& args,
                                        const ffi::RemainingRets& rets) {
  auto params = MakeFwdParams(attrs, args, rets, Workspace::kNone);
  RETURN_IF_ERROR(params);
  if (params->K > kMaxHeadSize || params->V > kMaxHeadSize) {
    return ffi::Unexpected(
        ffi::Error(ffi::ErrorCode::kUnimplemented,
                   "head sizes K, V must be at most 256; got " + std::to_string(params->K) + ", " +
                       std::to_string(params->V) + " (implementation=\"reference\" has no limit)"));
  }
  return params;
}

Executor ExecutorOf(ffi::ThreadPool& pool) {
  return {pool.num_threads(),
          [&pool](std::function<void()> task) { pool.Schedule(std::move(task)); }};
}

ffi::Error ChunkFwdImpl(ffi::ThreadPool pool, FwdAttrs attrs, ffi::RemainingArgs args,
                        ffi::RemainingRets rets) {
  const auto params = SupportedParams(attrs, args, rets);
  RETURN_IF_ERROR(params);
  return ChunkFwd(*params, SupportedKernels().front()->chunk, ExecutorOf(pool));
}

ffi::Error RecurrentFwdImpl(ffi::ThreadPool pool, FwdAttrs attrs, ffi::RemainingArgs args,
                            ffi::RemainingRets rets) {
  const auto params = SupportedParams(attrs, args, rets);
  RETURN_IF_ERROR(params);
  return RecurrentFwd(*params, SupportedKernels().front()->recurrent, ExecutorOf(pool));
}

}  // namespace
}  // namespace jax_kda::cpu

// args: q, k [..., T, H, K]; v [..., T, HV, V]; g [..., T, HV, K]; beta [..., T, HV]; [A_log];
// [dt_bias]; [offsets]; [initial_state [..., N, HV, V, K] or a pool]; [state_indices];
// [output_state_indices]; [checkpoint_indices]; then operands aliased to results.
// rets: o [..., T, HV, V]; [final_state].
XLA_FFI_DEFINE_HANDLER_SYMBOL(KdaChunkFwd, jax_kda::cpu::ChunkFwdImpl,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Attrs<jax_kda::FwdAttrs>()
                                  .RemainingArgs()
                                  .RemainingRets());

// The same.
XLA_FFI_DEFINE_HANDLER_SYMBOL(KdaRecurrentFwd, jax_kda::cpu::RecurrentFwdImpl,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Attrs<jax_kda::FwdAttrs>()
                                  .RemainingArgs()
                                  .RemainingRets());
