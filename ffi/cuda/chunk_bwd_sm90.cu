// Host side of the Hopper gradient: workspace, tensor maps, launches.
#include <cuda_runtime.h>

#include <algorithm>

#include "chunk_bwd_gradients_sm90.cuh"
#include "chunk_bwd_scan_sm90.cuh"
#include "chunk_bwd_sums_sm90.cuh"
#include "chunk_fwd_plan.cuh"
#include "launch_sm90.cuh"

namespace jax_kda {
namespace {

using sm90::kHead;
using sm90::Launch;
using sm90::MakeTileMap;

// Up to this many sequences times heads, V is split over two blocks: twice as many SMs, each with
// half the products. The two scans run side by side, so that 33 chains fill 132 SMs.
constexpr int64_t kSplitChains = 33;

// The forward that the reverse scan is: of do into dv, from dfinal_state to dinitial_state.
FwdParams Reverse(const BwdParams& b) {
  FwdParams reverse = b.fwd;
  reverse.v = b.do_;
  reverse.o = b.dv;
  reverse.initial_state = b.dfinal_state;
  reverse.final_state = b.dinitial_state;
  return reverse;
}

// `chains`: sequences, or numbers of segments.
template <typename Operand, int kWarpgroups>
ffi::Error LaunchScan(const BwdParams& b, const sm90::BwdWorkspace& ws, int64_t chains,
                      cudaStream_t stream) {
  const FwdParams& p = b.fwd;
  const bool prepared = p.B * p.T > 0;
  CUtensorMap v_map = {}, do_map = {}, dv_map = {};  // never used when there is no token
  if (prepared) {
    RETURN_IF_ERROR(MakeTileMap(&v_map, p.v, p.B * p.T, p.HV, kHead, kWarpgroups));
    RETURN_IF_ERROR(MakeTileMap(&do_map, b.do_, p.B * p.T, p.HV, kHead, kWarpgroups));
    RETURN_IF_ERROR(MakeTileMap(&dv_map, b.dv, p.B * p.T, p.HV, kHead, 1));
  }
  using Config = sm90::BwdScanConfig<kWarpgroups>;
  const dim3 grid(chains * p.HV, kWarpgroups == 1 ? 2 : 1, 2);
  return Launch("ChunkBwdScanKernel", sm90::ChunkBwdScanKernel<Operand, kWarpgroups>,
                {grid, Config::kThreads, Config::kBytes, prepared}, stream, v_map, do_map, dv_map,
                b, Reverse(b), ws);
}

template <typename Operand>
ffi::Error LaunchSummaries(const BwdParams& b, const sm90::BwdWorkspace& ws, cudaStream_t stream) {
  const FwdParams& p = b.fwd;
  CUtensorMap v_map, do_map;
  RETURN_IF_ERROR(MakeTileMap(&v_map, p.v, p.B * p.T, p.HV, kHead, 2));
  RETURN_IF_ERROR(MakeTileMap(&do_map, b.do_, p.B * p.T, p.HV, kHead, 2));
  using Config = sm90::BwdScanConfig<2>;
  const dim3 grid(ws.fwd.segments * p.HV, 1, 3);
  RETURN_IF_ERROR(Launch("ChunkBwdSummariseKernel", sm90::ChunkBwdSummariseKernel<Operand>,
                         {grid, Config::kThreads, Config::kBytes, true}, stream, v_map, do_map, b,
                         Reverse(b), ws));
  return sm90::LaunchCombine(p, ws.fwd, 2, stream);
}

template <bool kL2Norm, Gate kGate, typename G>
ffi::Error LaunchGradients(const BwdParams& b, const sm90::BwdWorkspace& ws, cudaStream_t stream) {
  const FwdParams& p = b.fwd;
  const int64_t tokens = p.B * p.T;
  sm90::GradientMaps maps = {};
  RETURN_IF_ERROR(MakeTileMap(&maps.q, p.q, tokens, p.H, kHead, 2));
  RETURN_IF_ERROR(MakeTileMap(&maps.k, p.k, tokens, p.H, kHead, 2));
  RETURN_IF_ERROR(MakeTileMap(&maps.do_, b.do_, tokens, p.HV, kHead, 2));
  RETURN_IF_ERROR(MakeTileMap(&maps.dq, b.dq, tokens, p.H, kHead, 2));
  RETURN_IF_ERROR(MakeTileMap(&maps.dk, b.dk, tokens, p.H, kHead, 2));
  if (sizeof(G) == 2) {
    RETURN_IF_ERROR(MakeTileMap(&maps.g, p.g, tokens, p.HV, kHead, 2));
    RETURN_IF_ERROR(MakeTileMap(&maps.dg, b.dg, tokens, p.HV, kHead, 2));
  }
  using Config = sm90::GradientsConfig;
  const int64_t blocks = std::min<int64_t>(ws.fwd.NT * p.H, sm90::kGradientBlocks);
  return Launch("ChunkBwdGradientsKernel", sm90::ChunkBwdGradientsKernel<kL2Norm, kGate, G>,
                {dim3(blocks), Config::kThreads, Config::kBytes, true}, stream, maps, b, ws);
}

template <bool kL2Norm, Gate kGate>
ffi::Error LaunchGradients(const BwdParams& b, const sm90::BwdWorkspace& ws, cudaStream_t stream) {
  return b.fwd.g_dtype == DType::kF32
             ? LaunchGradients<kL2Norm, kGate, float>(b, ws, stream)
             : LaunchGradients<kL2Norm, kGate, __nv_bfloat16>(b, ws, stream);
}

template <bool kL2Norm>
ffi::Error LaunchKernels(const BwdParams& b, const sm90::BwdWorkspace& ws, cudaStream_t stream) {
  using Operand = std::conditional_t<kL2Norm, sm90::Fp16, sm90::Bf16>;
  const FwdParams& p = b.fwd;
  const bool tokens = p.B * p.T > 0;
  if (tokens) {
    RETURN_IF_ERROR((sm90::LaunchPrepare<kL2Norm, true>(p, ws.fwd, sm90::WholeRows(p), stream)));
  }
  if (ws.fwd.segments > 0) RETURN_IF_ERROR(LaunchSummaries<Operand>(b, ws, stream));
  const int64_t chains = ws.fwd.segments > 0 ? ws.fwd.segments : p.B * p.M;
  if (chains * p.HV <= kSplitChains) {
    RETURN_IF_ERROR((LaunchScan<Operand, 1>(b, ws, chains, stream)));
  } else {
    RETURN_IF_ERROR((LaunchScan<Operand, 2>(b, ws, chains, stream)));
  }
  if (!tokens) return ffi::Error::Success();
  switch (p.gate) {
    case Gate::kActivated:
      return LaunchGradients<kL2Norm, Gate::kActivated>(b, ws, stream);
    case Gate::kSoftplus:
      return LaunchGradients<kL2Norm, Gate::kSoftplus>(b, ws, stream);
    default:
      return LaunchGradients<kL2Norm, Gate::kLowerBound>(b, ws, stream);
  }
}

}  // namespace

int64_t ChunkBwdWorkspaceBytes(int64_t B, int64_t T, int64_t H, int64_t HV, int64_t M, bool packed,
                               int64_t segment_chunks) {
  return sm90::BwdWorkspaceBytes(B, T, H, HV, M, packed, segment_chunks);
}

ffi::Error LaunchChunkBwdSm90(const BwdParams& b, cudaStream_t stream) {
  const FwdParams& p = b.fwd;
  const bool packed = p.offsets != nullptr;
  sm90::BwdWorkspace ws = {};
  const int64_t NT = ws.fwd.NT = sm90::ChunkSlots(p.B, p.T, p.M, packed), count = NT * p.HV;
  ws.fwd.images = p.workspace;
  ws.records = ws.fwd.images + count * sm90::gradient_image::kBytes;
  ws.parameter_sums = reinterpret_cast<float*>(ws.records + count * sm90::record::kBytes);
  std::byte* rest = reinterpret_cast<std::byte*>(ws.parameter_sums + count * sm90::kParameterSums);
  if (p.HV > p.H) {
    ws.group_sums = reinterpret_cast<float*>(rest);
    rest += int64_t{sm90::kGradientBlocks} * sm90::kGroupSums * sm90::kGradientThreads * 4;
  }
  ws.fwd.segments = sm90::Segments(p.B, p.T, p.M, packed, p.segment_chunks);
  ws.fwd.segment_states = reinterpret_cast<float*>(rest);
  ws.fwd.transitions = ws.fwd.segment_states + ws.fwd.segments * p.HV * 2 * (sm90::kState / 4);
  rest += ws.fwd.segments * p.HV * 4 * sm90::kState;
  if (p.B * p.M * p.HV > 0) {
    if (packed) {
      ws.fwd.sequences = reinterpret_cast<sm90::SequenceSlot*>(rest);
      ws.fwd.chunks = reinterpret_cast<sm90::ChunkSlot*>(ws.fwd.sequences + p.B * p.M);
      RETURN_IF_ERROR(Launch("ChunkFwdPlanKernel", sm90::ChunkFwdPlanKernel,
                             {dim3(1), sm90::kPlanThreads, 0}, stream, p, ws.fwd));
    }
    RETURN_IF_ERROR(p.l2norm ? LaunchKernels<true>(b, ws, stream)
                             : LaunchKernels<false>(b, ws, stream));
  }
  if (p.B == 0 || (b.dA_log == nullptr && b.ddt_bias == nullptr)) return ffi::Error::Success();
  return Launch("ChunkBwdSumsKernel", sm90::ChunkBwdSumsKernel,
                {dim3(p.B * p.HV, sm90::SumsConfig::kShares), sm90::SumsConfig::kThreads, 0, true},
                stream, b, ws);
}

}  // namespace jax_kda
