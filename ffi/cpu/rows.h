// The operands of a token as float32 rows of one head: converted, normalised, activated.
#pragma once

#include <cmath>
#include <cstdint>

#include "ffi/common/params.h"
#include "ffi/cpu/kernels.h"
#include "ffi/cpu/vec.h"

namespace jax_kda::cpu {
namespace {

inline constexpr float kGateMin = -110.0f;  // exp(-110) is 0 in float32; keeps -inf out of the sums

inline int64_t RoundUp(int64_t x, int64_t multiple) {
  return (x + multiple - 1) / multiple * multiple;
}

// Channels are padded with zeros to whole vectors of the longest kind.
inline int64_t PaddedK(const FwdParams& p) { return RoundUp(p.K, 16); }

// Rows of one head lie far apart: the hardware's prefetcher does not find the next one.
inline void PrefetchRow(DType dtype, const void* base, int64_t offset, int64_t n) {
  const int64_t bytes = dtype == DType::kBF16 ? 2 : 4;
  const char* from = static_cast<const char*>(base) + offset * bytes;
  for (int64_t i = 0; i < n * bytes; i += 64) __builtin_prefetch(from + i);
}

// n elements as float32, zeros after them up to `padded`.
template <class T>
inline void LoadRow(const void* base, int64_t offset, int64_t n, int64_t padded, float* to) {
  const T* from = static_cast<const T*>(base) + offset;
  for (int64_t i = 0; i < n; ++i) to[i] = ToFloat(from[i]);
  for (int64_t i = n; i < padded; ++i) to[i] = 0.0f;
}

inline void LoadRow(DType dtype, const void* base, int64_t offset, int64_t n, int64_t padded,
                    float* to) {
  if (dtype == DType::kBF16) {
    LoadRow<BF16>(base, offset, n, padded, to);
  } else {
    LoadRow<float>(base, offset, n, padded, to);
  }
}

template <class T>
inline void StoreRow(const float* from, int64_t n, void* base, int64_t offset) {
  T* to = static_cast<T*>(base) + offset;
  for (int64_t i = 0; i < n; ++i) FromFloat(from[i], to[i]);
}

inline void StoreRow(DType dtype, const float* from, int64_t n, void* base, int64_t offset) {
  if (dtype == DType::kBF16) {
    StoreRow<BF16>(from, n, base, offset);
  } else {
    StoreRow<float>(from, n, base, offset);
  }
}

// x <- factor x, after normalising it if the call asks for that.
template <class Isa>
void ScaleRow(const FwdParams& p, float* row, float factor) {
  using F = typename Isa::F;
  const int64_t Kp = PaddedK(p);
  if (p.l2norm) {
    F squares{};
    for (int64_t i = 0; i < Kp; i += Isa::kLanes) {
      squares += Isa::Load(row + i) * Isa::Load(row + i);
    }
    factor /= std::sqrt(Isa::Sum(squares) + 1e-6f);
  }
  for (int64_t i = 0; i < Kp; i += Isa::kLanes) Isa::Store(row + i, Isa::Load(row + i) * factor);
}

// The gate's input -> log decay, at least kGateMin.
template <class Isa>
void ActivateRow(const FwdParams& p, const HeadTokens& x, float* g) {
  using F = typename Isa::F;
  const int64_t Kp = PaddedK(p);
  if (p.gate != Gate::kActivated) {
    if (p.dt_bias != nullptr) {
      const float* bias = p.dt_bias + x.b * p.dt_bias_stride + x.hv * p.K;
      for (int64_t i = 0; i < p.K; ++i) g[i] += bias[i];
    }
    const float A = p.A_log == nullptr ? 1.0f : std::exp(p.A_log[x.b * p.A_log_stride + x.hv]);
    for (int64_t i = 0; i < Kp; i += Isa::kLanes) {
      const F y = Isa::Load(g + i);
      Isa::Store(g + i, p.gate == Gate::kSoftplus ? Isa::Softplus(y) * -A
                                                  : Isa::Sigmoid(y * A) * p.lower_bound);
    }
  }
  for (int64_t i = 0; i < Kp; i += Isa::kLanes) {
    Isa::Store(g + i, Isa::Max(Isa::Load(g + i), Isa::Splat(kGateMin)));
  }
}

// The write strengths of the tokens, zeros after them up to `padded`, a multiple of kLanes.
template <class Isa>
void LoadBeta(const FwdParams& p, const HeadTokens& x, int64_t padded, float* beta) {
  for (int64_t i = 0; i < padded; ++i) beta[i] = 0.0f;
  for (int64_t i = 0; i < x.count; ++i) {
    const int64_t offset = (x.b * p.T + x.token + i) * p.HV + x.hv;
    LoadRow(p.beta_dtype, p.beta, offset, 1, 1, beta + i);
  }
  if (p.beta_mode == BetaMode::kProbability) return;
  const float factor = p.beta_mode == BetaMode::kTwoSigmoid ? 2.0f : 1.0f;
  for (int64_t i = 0; i < padded; i += Isa::kLanes) {
    Isa::Store(beta + i, Isa::Sigmoid(Isa::Load(beta + i)) * factor);
  }
  for (int64_t i = x.count; i < padded; ++i) beta[i] = 0.0f;
}

}  // namespace
}  // namespace jax_kda::cpu
