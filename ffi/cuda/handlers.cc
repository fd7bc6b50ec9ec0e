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

ffi::Error CheckSupported(const FwdParams& p) {
  if (p.K != 128 || p.V != 128) {
    return Unimplemented("the CUDA kernel needs head sizes K = V = 128; got K = ", p.K,
                         ", V = ", p.V);
  }
  if (p.dtype != DType::kBF16)
    return Unimplemented("the CUDA kernel needs `q`, `k` and `v` of dtype bfloat16; got float32");
  if (p.B * p.T > INT32_MAX || p.B * p.M > INT32_MAX) {
    return Unimplemented("the CUDA kernel needs fewer than 2^31 tokens and sequences; got ",
                         p.B * p.T, " and ", p.B * p.M);
  }
  int device = 0, major = 0, minor = 0;
  RETURN_IF_ERROR(CudaError(cudaGetDevice(&device), "cudaGetDevice"));
  RETURN_IF_ERROR(
      CudaError(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device),
                "cudaDeviceGetAttribute"));
  RETURN_IF_ERROR(
      CudaError(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device),
                "cudaDeviceGetAttribute"));
  if (major != 9 || minor != 0) {
    return Unimplemented("the CUDA kernel needs a GPU of compute capability 9.0 (H100, H200); got ",
                         major, ".", minor);
  }
  return ffi::Error::Success();
}

ffi::Error ChunkFwdImpl(cudaStream_t stream, FwdAttrs attrs, ffi::RemainingArgs args,
                        ffi::RemainingRets rets) {
  ffi::ErrorOr<FwdParams> p = MakeFwdParams(attrs, args, rets, Workspace::kLastResult);
  RETURN_IF_ERROR(p);
  RETURN_IF_ERROR(CheckSupported(*p));
  const int64_t bytes = ChunkFwdWorkspaceBytes(p->B, p->T, p->HV, p->M, p->offsets != nullptr);
  if (p->workspace_bytes < bytes) {
    return check::Invalid("`workspace` must have at least ", bytes, " bytes; got ",
                          p->workspace_bytes);
  }
  return LaunchChunkFwdSm90(*p, stream);
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(KdaChunkFwd, ChunkFwdImpl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Attrs<FwdAttrs>()
                                  .RemainingArgs()   // q k v g beta [A_log] [dt_bias] [offsets]
                                                     // [initial_state] [out] [final_state]
                                  .RemainingRets(),  // o [final_state] workspace
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace jax_kda
