// XLA FFI handlers of the CUDA platform: parameters, what this platform runs, launch.
#include <cuda_runtime_api.h>

#include "ffi/common/check.h"
#include "ffi/cuda/launch.h"

namespace jax_kda {
namespace {

// Valid calls that no CUDA kernel runs: the message names the rule, the value and the way out.
template <class... Words>
ffi::Error Unimplemented(const Words&... words) {
  std::ostringstream out;
  (out << ... << words);
  out << "; implementation=\"reference\" runs it in plain JAX";
  return ffi::Error(ffi::ErrorCode::kUnimplemented, out.str());
}

// The compute capability of the current device, times ten.
ffi::ErrorOr<int> ComputeCapability() {
  int device = 0, major = 0, minor = 0;
  RETURN_IF_ERROR(CudaError(cudaGetDevice(&device), "cudaGetDevice"));
  RETURN_IF_ERROR(
      CudaError(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device),
                "cudaDeviceGetAttribute"));
  RETURN_IF_ERROR(
      CudaError(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device),
                "cudaDeviceGetAttribute"));
  return major * 10 + minor;
}

ffi::Error CheckChunkSupported(const FwdParams& p) {
  if ((p.K != 64 && p.K != 128) || (p.V != 64 && p.V != 128)) {
    return Unimplemented("the CUDA kernel needs head sizes K and V of 64 or 128; got K = ", p.K,
                         ", V = ", p.V);
  }
  if (p.dtype != DType::kBF16)
    return Unimplemented("the CUDA kernel needs `q`, `k` and `v` of dtype bfloat16; got float32");
  if (p.B * p.T > INT32_MAX || p.B * p.M > INT32_MAX) {
    return Unimplemented("the CUDA kernel needs fewer than 2^31 tokens and sequences; got ",
                         p.B * p.T, " and ", p.B * p.M);
  }
  const auto capability = ComputeCapability();
  RETURN_IF_ERROR(capability);
  if (*capability != 90) {
    return Unimplemented("the CUDA kernel needs a GPU of compute capability 9.0 (H100, H200); got ",
                         *capability / 10, ".", *capability % 10);
  }
  return ffi::Error::Success();
}

ffi::Error CheckRecurrentSupported(const FwdParams& p) {
  if (p.checkpoint_indices != nullptr) {
    return Unimplemented(
        "the CUDA kernel of the recurrence keeps no checkpoints; got "
        "`checkpoint_indices`");
  }
  if ((p.K != 64 && p.K != 128 && p.K != 256) || p.V > 256) {
    return Unimplemented(
        "the CUDA kernel needs head sizes K of 64, 128 or 256 and V of at most "
        "256; got K = ",
        p.K, ", V = ", p.V);
  }
  // A block has at least 16 rows of one state.
  if (p.B * p.M * p.HV * ((p.V + 15) / 16) > INT32_MAX) {
    return Unimplemented(
        "the CUDA kernel needs fewer than 2^31 / (V / 16) sequences times heads; "
        "got ",
        p.B * p.M * p.HV);
  }
  const auto capability = ComputeCapability();
  RETURN_IF_ERROR(capability);
  if (*capability < 80) {
    return Unimplemented("the CUDA kernel needs a GPU of compute capability 8.0 or more; got ",
                         *capability / 10, ".", *capability % 10);
  }
  return ffi::Error::Success();
}

ffi::Error ChunkFwdImpl(cudaStream_t stream, FwdAttrs attrs, ffi::RemainingArgs args,
                        ffi::RemainingRets rets) {
  ffi::ErrorOr<FwdParams> p = MakeFwdParams(attrs, args, rets, Workspace::kLastResult);
  RETURN_IF_ERROR(p);
  RETURN_IF_ERROR(CheckChunkSupported(*p));
  const int64_t bytes = ChunkFwdWorkspaceBytes(p->B, p->T, p->HV, p->M, p->offsets != nullptr,
                                               p->segment_chunks, p->slice_chunks);
  if (p->workspace_bytes < bytes) {
    return check::Invalid("`workspace` must have at least ", bytes, " bytes; got ",
                          p->workspace_bytes);
  }
  return LaunchChunkFwdSm90(*p, stream);
}

ffi::Error ChunkBwdImpl(cudaStream_t stream, FwdAttrs attrs, ffi::RemainingArgs args,
                        ffi::RemainingRets rets) {
  ffi::ErrorOr<BwdParams> b = MakeBwdParams(attrs, args, rets, Workspace::kLastResult);
  RETURN_IF_ERROR(b);
  const FwdParams& p = b->fwd;
  RETURN_IF_ERROR(CheckChunkSupported(p));
  if (p.K != 128 || p.V != 128) {
    return Unimplemented("the CUDA kernel of the gradient needs head sizes K = V = 128; got K = ",
                         p.K, ", V = ", p.V);
  }
  if (b->dfinal_state != nullptr && b->dinitial_state != nullptr &&
      b->dfinal_state_dtype != p.state_dtype) {
    const auto name = [](DType dtype) { return dtype == DType::kF32 ? "float32" : "bfloat16"; };
    return Unimplemented("the CUDA kernel needs `dfinal_state` of the dtype of `initial_state`, ",
                         name(p.state_dtype), "; got ", name(b->dfinal_state_dtype));
  }
  const int64_t bytes =
      ChunkBwdWorkspaceBytes(p.B, p.T, p.H, p.HV, p.M, p.offsets != nullptr, p.segment_chunks);
  if (p.workspace_bytes < bytes) {
    return check::Invalid("`workspace` must have at least ", bytes, " bytes; got ",
                          p.workspace_bytes);
  }
  return LaunchChunkBwdSm90(*b, stream);
}

ffi::Error RecurrentFwdImpl(cudaStream_t stream, FwdAttrs attrs, ffi::RemainingArgs args,
                            ffi::RemainingRets rets) {
  ffi::ErrorOr<FwdParams> p = MakeFwdParams(attrs, args, rets, Workspace::kNone);
  RETURN_IF_ERROR(p);
  RETURN_IF_ERROR(CheckRecurrentSupported(*p));
  return LaunchRecurrentFwd(*p, stream);
}

}  // namespace

// Operands and results of both are those of MakeFwdParams.
XLA_FFI_DEFINE_HANDLER_SYMBOL(KdaChunkFwd, ChunkFwdImpl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Attrs<FwdAttrs>()
                                  .RemainingArgs()
                                  .RemainingRets(),  // the last one is the workspace
                              {ffi::Traits::kCmdBufferCompatible});

// Operands and results are those of MakeBwdParams.
XLA_FFI_DEFINE_HANDLER_SYMBOL(KdaChunkBwd, ChunkBwdImpl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Attrs<FwdAttrs>()
                                  .RemainingArgs()
                                  .RemainingRets(),  // the last one is the workspace
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(KdaRecurrentFwd, RecurrentFwdImpl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Attrs<FwdAttrs>()
                                  .RemainingArgs()
                                  .RemainingRets(),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace jax_kda
