// The recurrence, token by token: what decode needs, on any GPU from sm_80 on.
//
//   S <- S diag(exp(g_t));  S <- S + beta_t (v_t - S k_t) k_t^T;  o_t = scale S q_t
//
// A state is read once and written once; nothing else is big. A row of S is its own recurrence: a
// block works out what all rows share (decay, norms, q, k, v of its tokens) in shared memory, then
// takes rows, 16 at a time, through all tokens in registers, while the next are on their way. Both
// products with the state are taken before it is updated, since S_new q = S q + v_new (k q): one
// reduction a token.
//
// Grid: x = (sequence, value head, tile of V). Block: 4 warps; eight lanes share a row of S, 16
// bytes a lane and access. Every lane has its own ring in shared memory for the rows to come, so
// no barrier guards it.
#include <cuda_bf16.h>
#include <cuda_pipeline_primitives.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "../common/slots.h"
#include "launch.h"

namespace jax_kda {
namespace {

constexpr int kThreads = 128, kWarps = 4;
constexpr int kLanes = 8;                 // of a row
constexpr int kRows = kThreads / kLanes;  // of a block at a time
constexpr int kMaxTokens = 16;            // in shared memory at a time
constexpr int kStages = 2;                // of rows on their way

// 16 bytes of a state as they are in memory, and as floats.
template <typename State>
constexpr int kPiece = 16 / sizeof(State);
__device__ void Unpack(float (&x)[4], uint4 raw) {
  x[0] = __uint_as_float(raw.x), x[1] = __uint_as_float(raw.y);
  x[2] = __uint_as_float(raw.z), x[3] = __uint_as_float(raw.w);
}
__device__ uint4 Pack(const float (&x)[4]) {
  return make_uint4(__float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]),
                    __float_as_uint(x[3]));
}
__device__ void Unpack(float (&x)[8], uint4 raw) {
  const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    x[2 * i] = __uint_as_float(words[i] << 16);
    x[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
  }
}
__device__ uint4 Pack(const float (&x)[8]) {
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(x[2 * i], x[2 * i + 1]);
    words[i] = *reinterpret_cast<const uint32_t*>(&pair);
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

__device__ float Load(const void* p, DType dtype, int64_t i) {
  return dtype == DType::kF32 ? static_cast<const float*>(p)[i]
                              : __bfloat162float(static_cast<const __nv_bfloat16*>(p)[i]);
}
__device__ void Store(void* p, DType dtype, int64_t i, float x) {
  if (dtype == DType::kF32) {
    static_cast<float*>(p)[i] = x;
  } else {
    static_cast<__nv_bfloat16*>(p)[i] = __float2bfloat16_rn(x);
  }
}

// Functions of full accuracy: an error of the decay is multiplied by the length of the memory.
__device__ float Decay(const FwdParams& p, float x, float dt_bias, float slope) {
  if (p.gate == Gate::kActivated) return expf(x);
  x += dt_bias;
  if (p.gate == Gate::kLowerBound) return expf(p.lower_bound / (1.f + expf(-slope * x)));
  return expf(-slope * (x > 20.f ? x : log1pf(expf(x))));
}

// The tokens of a sequence, counted over all rows, and those of no sequence around it that it
// zeroes: [before, begin) and [end, after).
struct Span {
  int64_t begin, end, before, after;
  bool malformed;  // of its row: results are NaN
};

__device__ Span FindSpan(const FwdParams& p, int64_t n) {
  if (p.offsets == nullptr) return {n * p.T, (n + 1) * p.T, n * p.T, (n + 1) * p.T, false};
  const int64_t row = n / p.M, m = n % p.M, first = row * p.T;
  const int64_t step = p.offsets_step;
  const int32_t* offsets = p.offsets + row * (step == 1 ? p.M + 1 : 2 * p.M);
  int malformed = 0;
  for (int64_t i = threadIdx.x; i < p.M; i += kThreads) {
    const int32_t begin = offsets[i * step], end = offsets[i * step + 1];
    const int32_t earliest = i == 0 ? 0 : offsets[(i - 1) * step + 1];
    malformed |= begin < earliest || end < begin || end > p.T;
    malformed |= step == 1 && i == 0 && begin != 0;
  }
  if (__syncthreads_or(malformed)) {
    return {first, first, first, m == 0 ? first + p.T : first, true};
  }
  const int64_t begin = first + offsets[m * step], end = first + offsets[m * step + 1];
  return {begin, end, m == 0 ? first : first + offsets[(m - 1) * step + 1],
          m == p.M - 1 ? first + p.T : end, false};
}

// o of this block's rows at tokens [first, last).
__device__ void FillOutput(const FwdParams& p, int64_t first, int64_t last, int64_t h, int v_begin,
                           int v_end, float x) {
  for (int64_t token = first; token < last; ++token) {
    for (int v = v_begin + static_cast<int>(threadIdx.x); v < v_end; v += kThreads) {
      Store(p.o, p.dtype, (token * p.HV + h) * p.V + v, x);
    }
  }
}

// What the rows of S share, of up to kMaxTokens tokens.
struct Scalars {
  float beta, k_norm, o_scale, qk;
};
template <int K>
struct SharedTokens {
  float (*q)[K];
  float (*k)[K];
  float (*decay)[K];
  float (*sums)[kWarps][3];  // q q, q k, k k by warp
  Scalars* scalars;
  float* v;  // [tokens, V]

  static constexpr int kTokenFloats = 3 * K + 3 * kWarps + 4;
  __device__ SharedTokens(uint4* memory, int tokens) {
    scalars = reinterpret_cast<Scalars*>(memory);
    q = reinterpret_cast<float (*)[K]>(scalars + tokens);
    k = q + tokens;
    decay = k + tokens;
    sums = reinterpret_cast<float (*)[kWarps][3]>(decay + tokens);
    v = reinterpret_cast<float*>(sums + tokens);
  }
};

// Fills `shared` for tokens [first, first + tokens) of value head h. Barriers around: nobody reads
// what was there before, and all threads see what is there after.
template <int K>
__device__ void ShareTokens(const SharedTokens<K>& shared, const FwdParams& p, int64_t first,
                            int tokens, int64_t row, int64_t h) {
  const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32, V = static_cast<int>(p.V);
  const int64_t qk_head = p.H == p.HV ? h : h / (p.HV / p.H);
  const float slope = p.A_log == nullptr ? 1.f : expf(p.A_log[row * p.A_log_stride + h]);
  __syncthreads();
  for (int t = 0; t < tokens; ++t) {
    const int64_t at = (first + t) * p.HV + h, qk_at = ((first + t) * p.H + qk_head) * K;
    float qq = 0.f, qk = 0.f, kk = 0.f;
#pragma unroll
    for (int c = tid; c < K; c += kThreads) {
      const float q = Load(p.q, p.dtype, qk_at + c), k = Load(p.k, p.dtype, qk_at + c);
      const float bias = p.dt_bias == nullptr ? 0.f : p.dt_bias[row * p.dt_bias_stride + h * K + c];
      shared.q[t][c] = q;
      shared.k[t][c] = k;
      shared.decay[t][c] = Decay(p, Load(p.g, p.g_dtype, at * K + c), bias, slope);
      qq = fmaf(q, q, qq);
      qk = fmaf(q, k, qk);
      kk = fmaf(k, k, kk);
    }
    for (int v = tid; v < V; v += kThreads) shared.v[t * V + v] = Load(p.v, p.dtype, at * V + v);
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
      qq += __shfl_xor_sync(~0u, qq, step);
      qk += __shfl_xor_sync(~0u, qk, step);
      kk += __shfl_xor_sync(~0u, kk, step);
    }
    if (lane == 0) {
      float* sums = shared.sums[t][warp];
      sums[0] = qq, sums[1] = qk, sums[2] = kk;
    }
  }
  __syncthreads();
  if (tid < tokens) {
    float beta = Load(p.beta, p.beta_dtype, (first + tid) * p.HV + h);
    if (p.beta_mode != BetaMode::kProbability) beta = 1.f / (1.f + expf(-beta));
    if (p.beta_mode == BetaMode::kTwoSigmoid) beta *= 2.f;
    float qq = 0.f, qk = 0.f, kk = 0.f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const float* sums = shared.sums[tid][w];
      qq += sums[0], qk += sums[1], kk += sums[2];
    }
    const float q_norm = p.l2norm ? rsqrtf(qq + 1e-6f) : 1.f;
    const float k_norm = p.l2norm ? rsqrtf(kk + 1e-6f) : 1.f;
    shared.scalars[tid] = {beta, k_norm, p.scale * q_norm, qk};
  }
  __syncthreads();
}

// A lane's channels of one token: `channel` + kLanes kSize j.
template <int kPieces, int kSize>
struct Operands {
  float q[kPieces][kSize], k[kPieces][kSize], decay[kPieces][kSize];

  template <int K>
  __device__ void Read(const SharedTokens<K>& shared, int t, int channel) {
#pragma unroll
    for (int j = 0; j < kPieces; ++j) {
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        const int c = channel + j * kLanes * kSize + i;
        q[j][i] = shared.q[t][c], k[j][i] = shared.k[t][c], decay[j][i] = shared.decay[t][c];
      }
    }
  }
};

// One token for a row of S; returns o.
template <int kPieces, int kSize>
__device__ float Step(float (&S)[kPieces][kSize], const Operands<kPieces, kSize>& x,
                      const Scalars& scalars, float v) {
  float Sq = 0.f, Sk = 0.f;
#pragma unroll
  for (int j = 0; j < kPieces; ++j) {
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      S[j][i] *= x.decay[j][i];
      Sq = fmaf(S[j][i], x.q[j][i], Sq);
      Sk = fmaf(S[j][i], x.k[j][i], Sk);
    }
  }
#pragma unroll
  for (int step = kLanes / 2; step > 0; step /= 2) {
    Sq += __shfl_xor_sync(~0u, Sq, step);
    Sk += __shfl_xor_sync(~0u, Sk, step);
  }
  // For the key as it is in `x`, not normalised.
  const float written = scalars.beta * (v - scalars.k_norm * Sk) * scalars.k_norm;
  if (written != 0.f) {  // nothing written leaves every bit, the sign of a zero too
#pragma unroll
    for (int j = 0; j < kPieces; ++j) {
#pragma unroll
      for (int i = 0; i < kSize; ++i) S[j][i] = fmaf(written, x.k[j][i], S[j][i]);
    }
  }
  return scalars.o_scale * fmaf(written, scalars.qk, Sq);
}

// kOneToken: of every sequence. Then a lane's part of it stays in registers, where every row finds
// it; else it is read from shared memory for each row.
template <int K, typename State, bool kOneToken>
__global__ void __launch_bounds__(kThreads, kOneToken ? (K == 256 ? 2 : 4) : (K == 256 ? 4 : 6))
    RecurrentFwdKernel(const __grid_constant__ FwdParams p, unsigned tiles, int tile_rows,
                       int max_tokens) {
  constexpr int kSize = kPiece<State>, kPieces = K / (kLanes * kSize);
  extern __shared__ uint4 memory[];
  uint4* ring = memory + threadIdx.x;  // [kStages, kPieces], kThreads apart
  const SharedTokens<K> shared(memory + kStages * kPieces * kThreads, max_tokens);
  const int tid = threadIdx.x, V = static_cast<int>(p.V);
  const unsigned chain = blockIdx.x / tiles, HV = static_cast<unsigned>(p.HV);
  const int64_t n = chain / HV, h = chain % HV;
  const int v_begin = static_cast<int>(blockIdx.x % tiles) * tile_rows,
            v_end = min(v_begin + tile_rows, V);
  const int first_v = v_begin + tid / kLanes, channel = tid % kLanes * kSize;

  const StateSlots slots = FindStateSlots(p, n);
  const Span span = FindSpan(p, n);
  const float fill = span.malformed ? NAN : 0.f;
  if (slots.padding) {
    FillOutput(p, span.before, span.after, h, v_begin, v_end, fill);
    return;
  }
  const State* from =
      static_cast<const State*>(p.initial_state) + (slots.read * HV + h) * V * K + channel;
  State* to = static_cast<State*>(p.final_state) + (slots.write * HV + h) * V * K + channel;
  auto load = [&](int v, int stage) {
    if (slots.read >= 0 && v < v_end) {
#pragma unroll
      for (int j = 0; j < kPieces; ++j) {
        __pipeline_memcpy_async(ring + (stage * kPieces + j) * kThreads,
                                from + v * K + j * kLanes * kSize, 16);
      }
    }
    __pipeline_commit();
  };
#pragma unroll
  for (int stage = 0; stage < kStages; ++stage) load(first_v + stage * kRows, stage);
  FillOutput(p, span.before, span.begin, h, v_begin, v_end, fill);
  FillOutput(p, span.end, span.after, h, v_begin, v_end, fill);

  const int64_t length = kOneToken ? 1 : span.end - span.begin, row = p.M == 1 ? n : n / p.M;
  const bool all_shared = length <= max_tokens;
  if (all_shared) ShareTokens(shared, p, span.begin, static_cast<int>(length), row, h);
  Operands<kPieces, kSize> x;
  if (kOneToken) x.Read(shared, 0, channel);
  int stage = 0;
  // All lanes take part in what is shared, those beyond the last row too.
  for (int v = first_v; v - tid / kLanes < v_end; v += kRows) {
    __pipeline_wait_prior(kStages - 1);
    float S[kPieces][kSize];
#pragma unroll
    for (int j = 0; j < kPieces; ++j) {
      Unpack(S[j], slots.read < 0 || v >= v_end ? uint4{} : ring[(stage * kPieces + j) * kThreads]);
    }
    for (int64_t first = 0; first < length; first += max_tokens) {
      const int tokens = static_cast<int>(min(int64_t{max_tokens}, length - first));
      if (!all_shared) ShareTokens(shared, p, span.begin + first, tokens, row, h);
      for (int t = 0; t < tokens; ++t) {
        if (!kOneToken) x.Read(shared, t, channel);
        const float o = Step(S, x, shared.scalars[t], v < v_end ? shared.v[t * V + v] : 0.f);
        if (tid % kLanes == 0 && v < v_end) {
          Store(p.o, p.dtype, ((span.begin + first + t) * HV + h) * V + v, o);
        }
      }
    }
    if (slots.write >= 0 && v < v_end) {
#pragma unroll
      for (int j = 0; j < kPieces; ++j) {
        if (span.malformed) {
#pragma unroll
          for (int i = 0; i < kSize; ++i) S[j][i] = NAN;
        }
        __stcs(reinterpret_cast<uint4*>(to + v * K + j * kLanes * kSize), Pack(S[j]));
      }
    }
    load(v + kStages * kRows, stage);  // this stage has been read: its numbers were used
    if (++stage == kStages) stage = 0;
  }
}

// With many sequences a block takes a whole state, so that its tokens are shared once; with few, as
// little as keeps all lanes busy.
template <int K, typename State, bool kOneToken>
ffi::Error LaunchKernel(const FwdParams& p, cudaStream_t stream) {
  constexpr int64_t kBlocksWanted = 1024;
  const int64_t chains = p.B * p.M * p.HV, steps = (p.V + kRows - 1) / kRows;
  const int64_t wanted = std::clamp<int64_t>((kBlocksWanted + chains - 1) / chains, 1, steps);
  const int64_t tile_rows = (steps + wanted - 1) / wanted * kRows;
  const int64_t tiles = (p.V + tile_rows - 1) / tile_rows;
  const int64_t max_tokens =
      p.offsets != nullptr ? kMaxTokens : std::clamp<int64_t>(p.T, 1, kMaxTokens);
  const int64_t ring_bytes = kStages * kRows * K * int64_t{sizeof(State)};
  const int64_t shared_bytes =
      ring_bytes + max_tokens * (SharedTokens<K>::kTokenFloats + p.V) * int64_t{sizeof(float)};
  const auto kernel = RecurrentFwdKernel<K, State, kOneToken>;
  RETURN_IF_ERROR(
      CudaError(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                     static_cast<int>(shared_bytes)),
                "RecurrentFwdKernel"));
  kernel<<<dim3(static_cast<unsigned>(chains * tiles)), kThreads, shared_bytes, stream>>>(
      p, static_cast<unsigned>(tiles), static_cast<int>(tile_rows), static_cast<int>(max_tokens));
  return CudaError(cudaGetLastError(), "RecurrentFwdKernel");
}

template <int K, typename State>
ffi::Error Launch(const FwdParams& p, cudaStream_t stream) {
  const bool one_token = p.T == 1 && p.offsets == nullptr;
  return one_token ? LaunchKernel<K, State, true>(p, stream)
                   : LaunchKernel<K, State, false>(p, stream);
}

template <int K>
ffi::Error LaunchState(const FwdParams& p, cudaStream_t stream) {
  return p.state_dtype == DType::kF32 ? Launch<K, float>(p, stream)
                                      : Launch<K, __nv_bfloat16>(p, stream);
}

}  // namespace

ffi::Error LaunchRecurrentFwd(const FwdParams& p, cudaStream_t stream) {
  RETURN_IF_ERROR(CopyPool(p, stream));
  if (p.B * p.M * p.HV == 0) return ffi::Error::Success();
  switch (p.K) {
    case 64:
      return LaunchState<64>(p, stream);
    case 128:
      return LaunchState<128>(p, stream);
    default:
      return LaunchState<256>(p, stream);
  }
}

}  // namespace jax_kda
