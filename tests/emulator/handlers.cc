// The CUDA launchers as handlers of the CPU platform, emulated.
#include <mutex>

#include "emulator.h"
#include "ffi/common/check.h"
#include "ffi/cuda/launch.h"

namespace jax_kda {
namespace {

std::mutex one_at_a_time;

template <typename Launch>
ffi::Error Emulate(Launch launch) {
  const std::lock_guard<std::mutex> lock(one_at_a_time);
  emulator::failure.clear();
  ffi::Error error = launch();
  return emulator::failure.empty() ? error : ffi::Error::Internal("emulator: " + emulator::failure);
}

ffi::Error ChunkFwd(FwdAttrs attrs, ffi::RemainingArgs args, ffi::RemainingRets rets) {
  ffi::ErrorOr<FwdParams> p = MakeFwdParams(attrs, args, rets, Workspace::kLastResult);
  RETURN_IF_ERROR(p);
  std::memset(p->workspace, 0xff, p->workspace_bytes);  // NaN
  return Emulate([&] { return LaunchChunkFwdSm90(*p, nullptr); });
}

ffi::Error ChunkBwd(FwdAttrs attrs, ffi::RemainingArgs args, ffi::RemainingRets rets) {
  ffi::ErrorOr<BwdParams> b = MakeBwdParams(attrs, args, rets, Workspace::kLastResult);
  RETURN_IF_ERROR(b);
  std::memset(b->fwd.workspace, 0xff, b->fwd.workspace_bytes);
  return Emulate([&] { return LaunchChunkBwdSm90(*b, nullptr); });
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    emulated_kda_chunk_fwd, ChunkFwd,
    ffi::Ffi::Bind().Attrs<FwdAttrs>().RemainingArgs().RemainingRets());
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    emulated_kda_chunk_bwd, ChunkBwd,
    ffi::Ffi::Bind().Attrs<FwdAttrs>().RemainingArgs().RemainingRets());

}  // namespace jax_kda
