// Prepare: q, k, g, beta of one chunk and value head -> its image (chunk_fwd_sm90.cuh): loads,
// Build (chunk_fwd_build_sm90.cuh), what is left of the inverse, stores.
//
// Grid: x = value head, y and z = chunk slot, counted in the slice. Block: 8 warps. Three blocks
// share an SM: 76,576 bytes, 80 registers a thread.
#pragma once

#include <type_traits>

#include "chunk_fwd_build_sm90.cuh"

namespace jax_kda::sm90 {

struct PrepareConfig {
  static constexpr int kThreads = kBuildThreads;

  // Shared memory, bytes. A_inv takes the place of the blocks it is made from.
  static constexpr int kTiles = 0;
  static constexpr int kOwn = 3 * kTile, kAInv = kOwn;
  static constexpr int kAqk = kOwn + 8 * BuildMemory::kOwnBytes;
  static constexpr int kDecay = kAqk + kMatrix;
  static constexpr int kBeta = kDecay + image::kDecayBytes;
  static constexpr int kBarrier = kBeta + kChunk * 4;
  static constexpr int kBytes = kBarrier + 16;
  static_assert(kAInv % 1024 == 0 && kAqk % 1024 == 0);
  static_assert(3 * (kBytes + 1024) <= 228 * 1024,
                "three blocks an SM, each with 1 KB of the system's");
};

// For the gradient, strictly below the diagonal: the inverse itself, in its place, and, for
// kErrors, in q's place the one with beta on the other side, which is similar to it.
template <typename Operand, bool kErrors>
__device__ __forceinline__ void PackStrictlyLower(const BuildMemory& m, uint32_t to, int tid) {
  const int i = tid & 63, first_piece = (tid >> 6) * 4;
  const float over_beta = kErrors ? Rcp(NotZero(LdsF32(m.beta + i * 4))) : 1.f;
  uint4 packed[4];
#pragma unroll
  for (int u = 0; u < 4; ++u) {
    const int j = (first_piece + u) * 8;
    packed[u] = {0, 0, 0, 0};
    if (j >> 4 <= i >> 4) {
      float x[8];
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        x[n] = j + n < i ? LdsF32(LAddress(m, i, j + n)) : 0.f;
        if (kErrors) x[n] *= NotZero(LdsF32(m.beta + (j + n) * 4)) * over_beta;
      }
      packed[u] = {Pack<Operand>(x[0], x[1]), Pack<Operand>(x[2], x[3]), Pack<Operand>(x[4], x[5]),
                   Pack<Operand>(x[6], x[7])};
    }
  }
  if (!kErrors) BarSync(kQuadBarrier, 128);
#pragma unroll
  for (int u = 0; u < 4; ++u) {
    Sts128(to + Swizzled(i, first_piece + u), packed[u]);
  }
}

// With q and k normalised every operand is at most 1 and fp16 holds it; as given they may be
// anything and take bf16.
template <bool kL2Norm, typename G, bool kGradient>
__global__ void __launch_bounds__(PrepareConfig::kThreads, sizeof(G) == 2 ? 3 : 2)
    ChunkFwdPrepareKernel(const __grid_constant__ CUtensorMap q_map,
                          const __grid_constant__ CUtensorMap k_map,
                          const __grid_constant__ CUtensorMap g_map,
                          const __grid_constant__ FwdParams p, const __grid_constant__ Workspace ws,
                          const __grid_constant__ Slice slice) {
  using C = PrepareConfig;
  using Operand = std::conditional_t<kL2Norm, Fp16, Bf16>;
  extern __shared__ __align__(1024) uint8_t shared[];
  const uint32_t smem = SharedAddress(shared);
  const BuildMemory m = {smem + C::kTiles, smem + C::kOwn, smem + C::kAqk, smem + C::kDecay,
                         smem + C::kBeta};
  int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31;
  // Of a block's chunk; read anew where it is needed again, since registers are short.
  auto slot_and_head = [&p, &ws, &slice] {
    const uint3 b = BlockIndex();
    const uint32_t slot = b.z * gridDim.y + b.y;
    return uint2{ws.chunks == nullptr ? SlotInSlice(p, slice, slot) : slot, b.x};
  };
  // That this kernel has ended has to mean that the one ahead has.
  auto leave = [] {
    const uint3 b = BlockIndex();
    if (b.x == gridDim.x - 1 && b.y == gridDim.y - 1 && b.z == gridDim.z - 1) GriddepcontrolWait();
  };
  // Of what is ahead of a first slice nothing is known; of a later one it is the scan before.
  if (slice.first == 0) GriddepcontrolWait();
  const auto [slot, h] = slot_and_head();
  const uint32_t HV = static_cast<uint32_t>(p.HV);
  GriddepcontrolLaunchDependents();  // the scan sets itself up while the last blocks work
  if (slot >= ws.NT) return leave();
  const ChunkSlot chunk = FindChunk(p, ws, slot);
  if (chunk.valid == 0) return leave();

  if (tid == 0) {
    const int qk_head = p.H == p.HV ? h : h / (HV / static_cast<uint32_t>(p.H));
    MbarrierInit(smem + C::kBarrier, 1);
    FenceMbarrierInit();
    MbarrierExpectTx(smem + C::kBarrier, (sizeof(G) == 2 ? 3 : 2) * kTile);
    TmaLoad(m.tiles + BuildMemory::kQ, &q_map, smem + C::kBarrier, qk_head, chunk.token, 0);
    TmaLoad(m.tiles + BuildMemory::kK, &k_map, smem + C::kBarrier, qk_head, chunk.token, 0);
    if constexpr (sizeof(G) == 2) {
      TmaLoad(m.tiles + BuildMemory::kG, &g_map, smem + C::kBarrier, h, chunk.token, 0);
    }
  }
  Octet octet{chunk.valid - warp * 8, 1.f, 1.f};
  const int K = static_cast<int>(p.K);
  GatePair<G> g[2][8];  // fp32: this lane's two channels of each half of this warp's rows
  if constexpr (sizeof(G) == 4) {
    const uint32_t stride = HV * static_cast<uint32_t>(p.K);
    const int second_half = K - 64;  // the first one again, if it is all
    const G* row =
        static_cast<const G*>(p.g) + (int64_t{chunk.token + warp * 8} * HV + h) * p.K + 2 * lane;
#pragma unroll
    for (int r = 0; r < 8; ++r, row += stride) {
      g[0][r] = g[1][r] = {};
      if (r < octet.left) {
        g[0][r] = *reinterpret_cast<const GatePair<G>*>(row);
        g[1][r] = *reinterpret_cast<const GatePair<G>*>(row + second_half);
      }
    }
  }
  // Loads are under way long before they are waited for.
  uint32_t beta_bits = 0;
  if (lane < min(octet.left, 8)) {  // of this warp's octet, a lane a token
    const int64_t at = int64_t{chunk.token + warp * 8 + lane} * HV + h;
    beta_bits = p.beta_dtype == DType::kF32 ? static_cast<const uint32_t*>(p.beta)[at]
                                            : static_cast<const uint16_t*>(p.beta)[at];
  }
  float dt_bias = 0.f;
  if (tid < K && p.dt_bias != nullptr) {
    dt_bias = p.dt_bias[chunk.row * p.dt_bias_stride + h * K + tid];
  }
  const float A_log = p.A_log == nullptr ? 0.f : p.A_log[chunk.row * p.A_log_stride + h];
  GateParams gate{p.gate, kLog2E, -Ex2(kLog2E * A_log)};
  if (p.gate == Gate::kLowerBound) gate = {p.gate, kLog2E * gate.scale, p.lower_bound * kLog2E};
  if (tid < kHead) StsF32(m.decay + tid * 4, dt_bias * gate.slope);
  __syncthreads();
  if (lane < 8) {
    float beta = __uint_as_float(p.beta_dtype == DType::kF32 ? beta_bits : beta_bits << 16);
    if (p.beta_mode != BetaMode::kProbability) beta = Rcp(1.f + Ex2(-kLog2E * beta));
    if (p.beta_mode == BetaMode::kTwoSigmoid) beta *= 2.f;
    StsF32(m.beta + (warp * 8 + lane) * 4, lane < octet.left ? beta : 0.f);
  }
  MbarrierWait(smem + C::kBarrier, 0);

  ClearRows(m.tiles, octet.left, warp, lane);
  Stacked x;
  LoadStacked(x, StackedFragment(m.tiles, warp, lane));
  if (kL2Norm) RowNorms(octet, x, lane);
  float within[4] = {};  // products of this warp's octet with itself
  if (BuildOctet<Operand, kL2Norm>(within, x, m, g, gate, octet, warp, lane)) {
    StoreStacked(x, StackedFragment(m.tiles, warp, lane));  // to have their registers
    const auto [slot, h] = slot_and_head();
    StrongOctet<Operand, kL2Norm, G>(within, m, p, FindChunk(p, ws, slot), gate, octet, h, warp,
                                     lane);
    LoadStacked(x, StackedFragment(m.tiles, warp, lane));
  }
  tid = ThreadIndex(), warp = tid >> 5, lane = tid & 31;
  if (kL2Norm) StoreWrites(m, octet, warp, lane);
  BuildProducts<Operand, kGradient>(m, x, Keep<Operand>(within), warp, lane);
  tid = ThreadIndex(), warp = tid >> 5, lane = tid & 31;
  BarSync(kAllBarrier, C::kThreads);
  if (warp >= 4) return;
  const auto [this_slot, this_head] = slot_and_head();
  std::byte* image = ws.images + (int64_t{this_slot} * HV + this_head) *
                                     (kGradient ? gradient_image::kBytes : image::kBytes);
  if (tid == 0) {
    FenceProxyAsync();  // for all that the barrier was for
    BulkStore(image, smem + C::kTiles, 3 * kTile);
    if constexpr (kGradient) {
      BulkStore(image + gradient_image::kAqk, smem + C::kAqk, kMatrix);
      BulkStore(image + gradient_image::kDecay, smem + C::kDecay, image::kDecayBytes);
      BulkStore(image + gradient_image::kBeta, smem + C::kBeta, gradient_image::kBetaBytes);
    } else {
      BulkStore(image + image::kAqk, smem + C::kAqk, triangle::kBytes);
      BulkStore(image + image::kDecay, smem + C::kDecay, image::kDecayBytes);
    }
    BulkCommit();
  }
  JoinInverses(m.own, m.own + BuildMemory::kScratch, kQuadBarrier, warp, lane);
  if constexpr (kGradient) {
    if (tid == 0) BulkWaitRead();  // q has left
    BarSync(kQuadBarrier, 128);
    PackStrictlyLower<Operand, true>(m, smem + C::kTiles, tid);
    PackStrictlyLower<Operand, false>(m, smem + C::kAInv, tid);
  } else {
    PackInverse<Operand>(m, smem + C::kAInv, tid);
  }
  BarSync(kQuadBarrier, 128);
  if (tid == 0) {
    FenceProxyAsync();
    if constexpr (kGradient) {
      BulkStore(image + gradient_image::kYInv, smem + C::kAInv, kMatrix);
      BulkStore(image + gradient_image::kEInv, smem + C::kTiles, kMatrix);
    } else {
      BulkStore(image + image::kAInv, smem + C::kAInv, triangle::kBytes);
    }
    BulkCommit();
    BulkWaitRead();
    leave();
  }
}

}  // namespace jax_kda::sm90
