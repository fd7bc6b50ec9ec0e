// Host side of the Hopper forward: workspace, tensor maps, launches.
#include <cuda_runtime.h>

#include <algorithm>

#include "chunk_fwd_plan.cuh"
#include "chunk_fwd_scan_sm90.cuh"
#include "launch_sm90.cuh"

namespace jax_kda {
namespace {

using sm90::kHead;
using sm90::Launch;
using sm90::MakeTileMap;

// Up to this many chains, or segments of them, V is split over two blocks: twice as many SMs, each
// with half the products. Of a V of 128 they are a pair, which reads the operands once.
constexpr int64_t kSplitChains = 66;

// `chains`: sequences, or numbers of segments. kPaired: as in ScanConfig.
template <typename Operand, int kWarpgroups, bool kPaired = false>
ffi::Error LaunchScan(const FwdParams& p, const sm90::Workspace& ws, const sm90::Slice& slice,
                      int64_t chains, cudaStream_t stream) {
  const bool prepared = p.B * p.T > 0;
  CUtensorMap v_map = {}, o_map = {};  // never used when there is no token
  if (prepared) {
    RETURN_IF_ERROR(MakeTileMap(&v_map, p.v, p.B * p.T, p.HV, p.V, kWarpgroups));
    RETURN_IF_ERROR(MakeTileMap(&o_map, p.o, p.B * p.T, p.HV, p.V, 1));
  }
  using Config = sm90::ScanConfig<kWarpgroups, true, kPaired>;
  const dim3 grid(chains * p.HV, p.V / 64 / kWarpgroups);
  return Launch("ChunkFwdScanKernel", sm90::ChunkFwdScanKernel<Operand, kWarpgroups, kPaired>,
                {grid, Config::kThreads, Config::kBytes, prepared, kPaired ? 2 : 1}, stream, v_map,
                o_map, p, ws, slice);
}

template <typename Operand>
ffi::Error LaunchSummaries(const FwdParams& p, const sm90::Workspace& ws, cudaStream_t stream) {
  CUtensorMap v_map;
  RETURN_IF_ERROR(MakeTileMap(&v_map, p.v, p.B * p.T, p.HV, p.V, 2));
  using Config = sm90::ScanConfig<2, false>;
  const dim3 grid(ws.segments * p.HV, 2);
  RETURN_IF_ERROR(Launch("ChunkFwdSummariseKernel", sm90::ChunkFwdSummariseKernel<Operand>,
                         {grid, Config::kThreads, Config::kBytes, true}, stream, v_map, p, ws));
  return sm90::LaunchCombine(p, ws, 1, stream);
}

template <bool kL2Norm>
ffi::Error LaunchKernels(const FwdParams& p, const sm90::Workspace& ws, cudaStream_t stream) {
  using Operand = std::conditional_t<kL2Norm, sm90::Fp16, sm90::Bf16>;
  const bool cut = ws.segments > 0;
  const int64_t chains = cut ? ws.segments : p.B * p.M;
  const bool split = p.V == 64 || chains * p.HV <= kSplitChains;
  const sm90::Slice rows = sm90::WholeRows(p);
  const uint32_t step = p.slice_chunks > 0 ? static_cast<uint32_t>(p.slice_chunks) : rows.count;
  // Each launch may begin before the one ahead ends: prepare, which needs nothing of it, beside the
  // scan of the slice before.
  sm90::Slice slice = {0, std::min(step, rows.count)};
  do {
    if (p.B * p.T > 0) {
      RETURN_IF_ERROR((sm90::LaunchPrepare<kL2Norm, false>(p, ws, slice, stream)));
    }
    if (cut) RETURN_IF_ERROR(LaunchSummaries<Operand>(p, ws, stream));
    RETURN_IF_ERROR(!split      ? (LaunchScan<Operand, 2>(p, ws, slice, chains, stream))
                    : p.V == 64 ? (LaunchScan<Operand, 1>(p, ws, slice, chains, stream))
                                : (LaunchScan<Operand, 1, true>(p, ws, slice, chains, stream)));
    slice.first += slice.count;
    slice.count = std::min(step, rows.count - slice.first);
  } while (slice.count > 0);
  return ffi::Error::Success();
}

}  // namespace

int64_t ChunkFwdWorkspaceBytes(int64_t B, int64_t T, int64_t HV, int64_t M, bool packed,
                               int64_t segment_chunks, int64_t slice_chunks) {
  int64_t bytes;
  sm90::LayOut(nullptr, B, T, HV, M, packed, segment_chunks, slice_chunks, &bytes);
  return bytes;
}

ffi::Error LaunchChunkFwdSm90(const FwdParams& p, cudaStream_t stream) {
  RETURN_IF_ERROR(CopyPool(p, stream));
  if (p.B * p.M * p.HV == 0) return ffi::Error::Success();
  const bool packed = p.offsets != nullptr;
  int64_t bytes;
  const sm90::Workspace ws = sm90::LayOut(p.workspace, p.B, p.T, p.HV, p.M, packed,
                                          p.segment_chunks, p.slice_chunks, &bytes);
  if (packed) {
    RETURN_IF_ERROR(Launch("ChunkFwdPlanKernel", sm90::ChunkFwdPlanKernel,
                           {dim3(1), sm90::kPlanThreads, 0}, stream, p, ws));
  }
  return p.l2norm ? LaunchKernels<true>(p, ws, stream) : LaunchKernels<false>(p, ws, stream);
}

}  // namespace jax_kda
