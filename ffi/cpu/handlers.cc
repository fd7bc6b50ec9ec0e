// The FFI handlers of the CPU platform.
#include "ffi/cpu/handlers.h"

#include "ffi/common/check.h"
#include "ffi/cpu/chunk_bwd.h"
#include "ffi/cpu/chunk_fwd.h"
#include "ffi/cpu/kernels.h"
#include "ffi/cpu/recurrent_fwd.h"
#include "xla/ffi/api/ffi.h"

namespace jax_kda::cpu {
namespace {

constexpr int64_t kMaxHeadSize = 256;

ffi::Error CheckHeadSizes(const FwdParams& p) {
  if (p.K <= kMaxHeadSize && p.V <= kMaxHeadSize) return ffi::Error::Success();
  return ffi::Error(ffi::ErrorCode::kUnimplemented,
                    "head sizes K, V must be at most 256; got " + std::to_string(p.K) + ", " +
                        std::to_string(p.V) + " (implementation=\"reference\" has no limit)");
}

ffi::ErrorOr<FwdParams> SupportedParams(const FwdAttrs& attrs, const ffi::RemainingArgs& args,
                                        const ffi::RemainingRets& rets) {
  auto params = MakeFwdParams(attrs, args, rets, Workspace::kNone);
  RETURN_IF_ERROR(params);
  RETURN_IF_ERROR(CheckHeadSizes(*params));
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

ffi::Error ChunkBwdImpl(ffi::ThreadPool pool, FwdAttrs attrs, ffi::RemainingArgs args,
                        ffi::RemainingRets rets) {
  const auto params = MakeBwdParams(attrs, args, rets, Workspace::kNone);
  RETURN_IF_ERROR(params);
  RETURN_IF_ERROR(CheckHeadSizes(params->fwd));
  return ChunkBwd(*params, SupportedKernels().front()->chunk_grad, ExecutorOf(pool));
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

// args: those of KdaChunkFwd up to initial_state, which is no pool; do [..., T, HV, V];
// [dfinal_state]. rets: dq, dk, dv, dg, dbeta like their primals; [dA_log [..., HV]];
// [ddt_bias [..., HV, K]]; [dinitial_state].
XLA_FFI_DEFINE_HANDLER_SYMBOL(KdaChunkBwd, jax_kda::cpu::ChunkBwdImpl,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Attrs<jax_kda::FwdAttrs>()
                                  .RemainingArgs()
                                  .RemainingRets());
