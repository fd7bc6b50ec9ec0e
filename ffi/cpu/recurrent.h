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

inline constexpr int kRecurrentTokens = 16;  // divides kChunk

struct RecurrentScratch {
  // [tokens, Kp / kLanes, 4, kLanes]: vectors of decay, decay_low, k and scaled q, side by side so
  // that one pointer reaches them. exp(g) = decay + decay_low: with one float32, the rounding of a
  // decay near 1 would add up over the tokens that S remembers.
  float* operands;
  float* rows;  // [3, Kp]  q, k and g of one token
  float* v;     // [tokens, rows]
  float* o;     // [tokens, rows]
  float* beta;  // [tokens]

  static int64_t Size(const FwdParams& p) {
    return (4 * kRecurrentTokens + 3) * PaddedK(p) + kRecurrentTokens * (2 * RoundUp(p.V, 16) + 1);
  }

  static RecurrentScratch At(float* scratch, const FwdParams& p) {
    const int64_t values = kRecurrentTokens * RoundUp(p.V, 16);
    RecurrentScratch s;
    s.operands = scratch;
    s.rows = s.operands + 4 * kRecurrentTokens * PaddedK(p);
    s.v = s.rows + 3 * PaddedK(p);
    s.o = s.v + values;
    s.beta = s.o + values;
    return s;
  }
};

// Token t of x into the scratch.
template <class Isa>
void PrepareToken(const FwdParams& p, const HeadTokens& x, int64_t t, const RecurrentScratch& s) {
  constexpr int kLanes = Isa::kLanes;
  const int64_t Kp = PaddedK(p);
  const int64_t row = x.b * p.T + x.token + t;
  const int64_t h = x.hv / (p.HV / p.H);
  float* q = s.rows;
  float* k = q + Kp;
  float* g = k + Kp;
  LoadRow(p.dtype, p.q, (row * p.H + h) * p.K, p.K, Kp, q);
  LoadRow(p.dtype, p.k, (row * p.H + h) * p.K, p.K, Kp, k);
  LoadRow(p.g_dtype, p.g, (row * p.HV + x.hv) * p.K, p.K, Kp, g);
  ScaleRow<Isa>(p, q, p.scale);
  if (p.l2norm) ScaleRow<Isa>(p, k, 1.0f);
  ActivateRow<Isa>(p, x, g);
  float* operands = s.operands + 4 * t * Kp;
  for (int64_t n = 0; n < Kp; n += kLanes, operands += 4 * kLanes) {
    typename Isa::F decay_low;
    Isa::Store(operands, Isa::Exp(Isa::Load(g + n), decay_low));
    Isa::Store(operands + kLanes, decay_low);
    Isa::Store(operands + 2 * kLanes, Isa::Load(k + n));
    Isa::Store(operands + 3 * kLanes, Isa::Load(q + n));
  }
}

template <class Isa>
struct Move {
  using F = typename Isa::F;
  static constexpr int kLanes = Isa::kLanes;

  const FwdParams& p;
  const HeadTokens& x;
  const StateRows& y;
  const RecurrentScratch& s;
  const int64_t Kp;

  void Run(const float* from, float* to) const {
    for (int64_t t = 0; t < x.count; ++t) {
      LoadRow(p.dtype, p.v, ValueOffset(t), y.rows, y.rows, s.v + t * y.rows);
    }
    int64_t i = 0;
    for (; i + Isa::kRows <= y.rows; i += Isa::kRows) {
      MoveTile<Isa::kRows>(i, from + i * Kp, to + i * Kp);
    }
    for (; i < y.rows; ++i) MoveTile<1>(i, from + i * Kp, to + i * Kp);
    for (int64_t t = 0; t < x.count; ++t) {
      StoreRow(p.dtype, s.o + t * y.rows, y.rows, p.o, ValueOffset(t));
    }
  }

  int64_t ValueOffset(int64_t t) const {
    return ((x.b * p.T + x.token + t) * p.HV + x.hv) * p.V + y.row;
  }

  // Rows [i, i + kRows) of y over all tokens.
  template <int kRows>
  void MoveTile(int64_t i, const float* from, float* to) const {
    for (int64_t t = 0; t < x.count; ++t, from = to) {
      const float* operands = s.operands + 4 * t * Kp;
      float u[kRows];
      Recall<kRows>(operands, from, to, u, Kp);
      for (int r = 0; r < kRows; ++r) u[r] = s.beta[t] * (s.v[t * y.rows + i + r] - u[r]);
      Write<kRows>(operands, u, to, s.o + t * y.rows + i, Kp);
    }
  }

  // to = from diag(decay), recalled = to k. Kp is an argument: stores might change a member, and it
  // would be loaded again for every row.
  template <int kRows>
  [[gnu::always_inline]] static void Recall(const float* operands, const float* from, float* to,
                                            float* recalled, int64_t Kp) {
    F sum[kRows];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) sum[r] = F{};
    for (int64_t n = 0; n < Kp; n += kLanes, operands += 4 * kLanes) {
      const F decay = Isa::Load(operands);
      const F decay_low = Isa::Load(operands + kLanes);
      const F k = Isa::Load(operands + 2 * kLanes);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        const F old = Isa::LoadUnaligned(from + r * Kp + n);
        const F S = decay == 1.0f ? old : old * decay + old * decay_low;
        Isa::StoreUnaligned(to + r * Kp + n, S);
        sum[r] += S * k;
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) recalled[r] = Isa::Sum(sum[r]);
  }

  // S <- S + u k^T, o = S q.
  template <int kRows>
  [[gnu::always_inline]] static void Write(const float* operands, const float* u, float* S,
                                           float* o, int64_t Kp) {
    F sum[kRows], us[kRows];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      sum[r] = F{};
      us[r] = Isa::Splat(u[r]);
    }
    for (int64_t n = 0; n < Kp; n += kLanes, operands += 4 * kLanes) {
      const F k = Isa::Load(operands + 2 * kLanes);
      const F q = Isa::Load(operands + 3 * kLanes);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        const F old = Isa::LoadUnaligned(S + r * Kp + n);
        const F now = us[r] == 0.0f ? old : old + us[r] * k;
        Isa::StoreUnaligned(S + r * Kp + n, now);
        sum[r] += now * q;
      }
    }
#pragma GCC unroll 8
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
void RunRecurrentPrepare(const FwdParams& p, const HeadTokens& x, float* scratch) {
  const RecurrentScratch s = RecurrentScratch::At(scratch, p);
  LoadBeta<Isa>(p, x, kRecurrentTokens, s.beta);
  for (int64_t t = 0; t < x.count; ++t) PrepareToken<Isa>(p, x, t, s);
}

template <class Isa>
void RunMove(const FwdParams& p, const HeadTokens& x, const StateRows& y, const float* from,
             float* to, float* scratch) {
  Move<Isa>{p, x, y, RecurrentScratch::At(scratch, p), PaddedK(p)}.Run(from, to);
}

template <class Isa>
constexpr RecurrentKernel MakeRecurrentKernel() {
  return {Isa::kRows,    kRecurrentTokens, RecurrentScratchSize,     PaddedK,
          LoadStateRows, StoreStateRows,   RunRecurrentPrepare<Isa>, RunMove<Isa>};
}

}  // namespace
}  // namespace jax_kda::cpu
