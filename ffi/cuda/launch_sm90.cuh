// Host side of Hopper launches: tensor maps, kernels that may start early, and what the forward and
// the gradient share, prepare and combine.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <string>

#include "chunk_fwd_combine_sm90.cuh"
#include "chunk_fwd_prepare_sm90.cuh"
#include "launch.h"

namespace jax_kda::sm90 {

// [tokens, heads, size] bf16, size 64 or 128, as tiles of `halves` x 64 tokens x 64 channels; a
// half that is not there is read as zeros. The driver's function comes through the runtime, so that
// nothing links libcuda.
inline ffi::Error MakeTileMap(CUtensorMap* map, const void* data, int64_t tokens, int64_t heads,
                              int64_t size, int halves) {
  using Encode =
      CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                   const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave,
                   CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
  void* encode = nullptr;
  cudaDriverEntryPointQueryResult found;
  RETURN_IF_ERROR(CudaError(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &encode,
                                                             12000, cudaEnableDefault, &found),
                            "cudaGetDriverEntryPointByVersion"));
  if (encode == nullptr)
    return ffi::Error(ffi::ErrorCode::kUnimplemented,
                      "the CUDA driver has no cuTensorMapEncodeTiled");
  const cuuint64_t head_bytes = static_cast<cuuint64_t>(size) * 2;
  const cuuint64_t sizes[] = {64, static_cast<cuuint64_t>(heads), static_cast<cuuint64_t>(tokens),
                              static_cast<cuuint64_t>(size) / 64};
  const cuuint64_t strides[] = {head_bytes, static_cast<cuuint64_t>(heads) * head_bytes, 128};
  const cuuint32_t box[] = {64, 1, kChunk, static_cast<cuuint32_t>(halves)}, steps[] = {1, 1, 1, 1};
  const CUresult status = reinterpret_cast<Encode>(encode)(
      map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4, const_cast<void*>(data), sizes, strides, box, steps,
      CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS) {
    return ffi::Error::Internal("cuTensorMapEncodeTiled failed with CUresult " +
                                std::to_string(static_cast<int>(status)));
  }
  return ffi::Error::Success();
}

struct Shape {
  dim3 grid;
  int threads;
  int shared_bytes;
  bool early = false;  // may start before the kernel ahead ends: it waits by itself
  int cluster = 1;     // blocks along y that are a cluster; divides grid.y
};

template <typename... Params, typename... Args>
ffi::Error Launch(const char* name, void (*kernel)(Params...), const Shape& shape,
                  cudaStream_t stream, const Args&... args) {
  RETURN_IF_ERROR(CudaError(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shape.shared_bytes),
      name));
  cudaLaunchAttribute attributes[2] = {};
  int count = 0;
  if (shape.early) {
    cudaLaunchAttribute& early = attributes[count++];
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
  }
  if (shape.cluster > 1) {
    cudaLaunchAttribute& cluster = attributes[count++];
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = 1;
    cluster.val.clusterDim.y = shape.cluster;
    cluster.val.clusterDim.z = 1;
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = shape.grid;
  config.blockDim = dim3(shape.threads);
  config.dynamicSmemBytes = shape.shared_bytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = count;
  return CudaError(cudaLaunchKernelEx(&config, kernel, args...), name);
}

inline Slice WholeRows(const FwdParams& p) {
  return {0, static_cast<uint32_t>((p.T + kChunk - 1) / kChunk)};
}

template <bool kL2Norm, bool kGradient>
ffi::Error LaunchPrepare(const FwdParams& p, const Workspace& ws, const Slice& slice,
                         cudaStream_t stream) {
  CUtensorMap q_map, k_map, g_map = {};
  RETURN_IF_ERROR(MakeTileMap(&q_map, p.q, p.B * p.T, p.H, p.K, 2));
  RETURN_IF_ERROR(MakeTileMap(&k_map, p.k, p.B * p.T, p.H, p.K, 2));
  if (p.g_dtype == DType::kBF16) {
    RETURN_IF_ERROR(MakeTileMap(&g_map, p.g, p.B * p.T, p.HV, p.K, 2));
  }
  const auto kernel = p.g_dtype == DType::kF32
                          ? ChunkFwdPrepareKernel<kL2Norm, float, kGradient>
                          : ChunkFwdPrepareKernel<kL2Norm, __nv_bfloat16, kGradient>;
  // The y and z axes of a grid end at 65,535.
  const int64_t slots = ws.chunks == nullptr ? p.B * slice.count : ws.NT;
  const int64_t z = (slots + 65534) / 65535, y = (slots + z - 1) / z;
  return Launch("ChunkFwdPrepareKernel", kernel,
                {dim3(p.HV, y, z), PrepareConfig::kThreads, PrepareConfig::kBytes, true}, stream,
                q_map, k_map, g_map, p, ws, slice);
}

template <int kRows>
ffi::Error LaunchCombine(const FwdParams& p, const Workspace& ws, int passes, cudaStream_t stream) {
  using Config = CombineConfig<kRows>;
  const dim3 grid(p.B * p.M * p.HV, p.V / kRows, passes);
  return Launch("ChunkFwdCombineKernel", ChunkFwdCombineKernel<kRows>,
                {grid, Config::kThreads, Config::kBytes, true}, stream, p, ws);
}
// Of one pass or, for the gradient, two. A block takes an SM: 16 rows where 8 would come in waves.
inline ffi::Error LaunchCombine(const FwdParams& p, const Workspace& ws, int passes,
                                cudaStream_t stream) {
  return p.B * p.M * p.HV * (p.V / 8) * passes <= kSms ? LaunchCombine<8>(p, ws, passes, stream)
                                                       : LaunchCombine<16>(p, ws, passes, stream);
}

}  // namespace jax_kda::sm90
