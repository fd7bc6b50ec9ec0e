// A few tokens of one value head, one after the other, in float32:
//
//     S <- S diag(exp(g_t)),    u = beta_t (v_t - S k_t),    S <- S + u k_t^T,    o_t = scale S q_t
//
// S is held as in memory, [V, K]. Its rows are independent of each other, so a tile of rows goes
// over all tokens before the next: a state is read once and written once. Per token and row that is
// two passes along K, with the row in the first-level cache.
//
// What a token must leave alone it leaves alone bit by bit, -0 and denormals too: channels with
// decay 1, and rows with u = 0.
#pragma once

#include <cstdint>
#include <cstring>

#include "ffi/common/params.h"
#include "ffi/cpu/kernels.h"
#include "ffi/cpu/rows.h"
#include "ffi/cpu/vec.h"

namespace jax_kda::cpu {
namespace {

inline constexpr int kRecurrentTile = 4;     // rows: they share the loads of a token's operands
inline constexpr int kRecurrentTokens = 16;  // divides kChunk

struct RecurrentScratch {
  float* q;  // [tokens, Kp]  scaled
  float* k;  // [tokens, Kp]
  // exp(g) = decay + decay_low: with one float32, the rounding of a decay near 1 would add up over
  // the tokens that S remembers.
  float* decay;      // [tokens, Kp]
  float* decay_low;  // [tokens, Kp]
  float* v;          // [tokens, V]
  float* o;          // [tokens, V]
  float* beta;       // [tokens]

  static int64_t Size(const FwdParams& p) {
    return kRecurrentTokens * (4 * PaddedK(p) + 2 * RoundUp(p.V, 16) + 1);
  }

  static RecurrentScratch At(float* scratch, const FwdParams& p) {
    const int64_t row = kRecurrentTokens * PaddedK(p);
    const int64_t values = kRecurrentTokens * RoundUp(p.V, 16);
    RecurrentScratch s;
    s.q = scratch;
    s.k = s.q + row;
    s.decay = s.k + row;
    s.decay_low = s.decay + row;
    s.v = s.decay_low + row;
    s.o = s.v + values;
    s.beta = s.o + values;
    return s;
  }
};

template <class Isa>
struct Recurrent {
  using F = typename Isa::F;
  static constexpr int kLanes = Isa::kLanes;

  const FwdParams& p;
  const HeadTokens& x;
  const StateRows& y;
  const RecurrentScratch& s;
  const int64_t Kp;

  void Run(const float* from, float* to) const {
    LoadBeta<Isa>(p, x, kRecurrentTokens, s.beta);
    for (int64_t t = 0; t < x.count; ++t) LoadToken(t);
    int64_t i = 0;
    for (; i + kRecurrentTile <= y.rows; i += kRecurrentTile) {
      MoveTile<kRecurrentTile>(i, from + i * Kp, to + i * Kp);
    }
    for (; i < y.rows; ++i) MoveTile<1>(i, from + i * Kp, to + i * Kp);
    for (int64_t t = 0; t < x.count; ++t) {
      StoreRow(p.dtype, s.o + t * y.rows, y.rows, p.o, ValueOffset(t));
    }
  }

  int64_t ValueOffset(int64_t t) const {
    return ((x.b * p.T + x.token + t) * p.HV + x.hv) * p.V + y.row;
  }

  void LoadToken(int64_t t) const {
    const int64_t row = x.b * p.T + x.token + t;
    const int64_t h = x.hv / (p.HV / p.H);
    float* q = s.q + t * Kp;
    float* k = s.k + t * Kp;
    float* decay = s.decay + t * Kp;
    float* decay_low = s.decay_low + t * Kp;
    LoadRow(p.dtype, p.q, (row * p.H + h) * p.K, p.K, Kp, q);
    LoadRow(p.dtype, p.k, (row * p.H + h) * p.K, p.K, Kp, k);
    LoadRow(p.g_dtype, p.g, (row * p.HV + x.hv) * p.K, p.K, Kp, decay);
    LoadRow(p.dtype, p.v, ValueOffset(t), y.rows, y.rows, s.v + t * y.rows);
    ScaleRow<Isa>(p, q, p.scale);
    if (p.l2norm) ScaleRow<Isa>(p, k, 1.0f);
    ActivateRow<Isa>(p, x, decay);
    for (int64_t i = 0; i < Kp; i += kLanes) {
      F low;
      Isa::Store(decay + i, Isa::Exp(Isa::Load(decay + i), low));
      Isa::Store(decay_low + i, low);
    }
  }

  // Rows [i, i + kRows) of y over all tokens.
  template <int kRows>
  void MoveTile(int64_t i, const float* from, float* to) const {
    for (int64_t t = 0; t < x.count; ++t, from = to) {
      float u[kRows];
      Recall<kRows>(t, from, to, u);
      for (int r = 0; r < kRows; ++r) u[r] = s.beta[t] * (s.v[t * y.rows + i + r] - u[r]);
      Write<kRows>(t, u, to, s.o + t * y.rows + i);
    }
  }

  // to = from diag(decay), recalled = to k.
  template <int kRows>
  [[gnu::always_inline]] void Recall(int64_t t, const float* from, float* to,
                                     float* recalled) const {
    F sum[kRows];
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) sum[r] = F{};
    for (int64_t n = 0; n < Kp; n += kLanes) {
      const F k = Isa::Load(s.k + t * Kp + n);
      const F decay = Isa::Load(s.decay + t * Kp + n);
      const F decay_low = Isa::Load(s.decay_low + t * Kp + n);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        const F old = Isa::LoadUnaligned(from + r * Kp + n);
        const F S = decay == 1.0f ? old : old * decay + old * decay_low;
        Isa::StoreUnaligned(to + r * Kp + n, S);
        sum[r] += S * k;
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) recalled[r] = Isa::Sum(sum[r]);
  }

  // S <- S + u k^T, o = S q.
  template <int kRows>
  [[gnu::always_inline]] void Write(int64_t t, const float* u, float* S, float* o) const {
    F sum[kRows], us[kRows];
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      sum[r] = F{};
      us[r] = Isa::Splat(u[r]);
    }
    for (int64_t n = 0; n < Kp; n += kLanes) {
      const F k = Isa::Load(s.k + t * Kp + n);
      const F q = Isa::Load(s.q + t * Kp + n);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        const F old = Isa::LoadUnaligned(S + r * Kp + n);
        const F now = us[r] == 0.0f ? old : old + us[r] * k;
        Isa::StoreUnaligned(S + r * Kp + n, now);
        sum[r] += now * q;
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) o[r] = Isa::Sum(sum[r]);
  }
};

// ---- the kernel

int64_t RecurrentScratchSize(const FwdParams& p) { return RecurrentScratch::Size(p); }

void LoadStateRows(const FwdParams& p, const StateRows& y, const void* from, float* S) {
  const int64_t Kp = PaddedK(p);
  if (from == nullptr) {
    std::memset(S, 0, y.rows * Kp * sizeof(float));
    return;
  }
  for (int64_t i = 0; i < y.rows; ++i) {
    LoadRow(p.state_dtype, from, (y.row + i) * p.K, p.K, Kp, S + i * Kp);
  }
}

void StoreStateRows(const FwdParams& p, const StateRows& y, const float* S, void* to) {
  const int64_t Kp = PaddedK(p);
  for (int64_t i = 0; i < y.rows; ++i) {
    StoreRow(p.state_dtype, S + i * Kp, p.K, to, (y.row + i) * p.K);
  }
}

template <class Isa>
void RunMove(const FwdParams& p, const HeadTokens& x, const StateRows& y, const float* from,
             float* to, float* scratch) {
  Recurrent<Isa>{p, x, y, RecurrentScratch::At(scratch, p), PaddedK(p)}.Run(from, to);
}

template <class Isa>
constexpr RecurrentKernel MakeRecurrentKernel() {
  return {kRecurrentTile, kRecurrentTokens, RecurrentScratchSize, PaddedK,
          LoadStateRows,  StoreStateRows,   RunMove<Isa>};
}

}  // namespace
}  // namespace jax_kda::cpu
