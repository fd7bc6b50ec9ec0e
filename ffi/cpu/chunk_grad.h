// The gradient of one chunk of C = 64 tokens of one value head, in float32. `d` and a name is the
// cotangent of what has that name. In the words of chunk.h, but without beta in k_decayed and Akk:
//
//   forward:   e = (I + Akk diag(beta))^-1 (v - k_decayed S)          v_new = diag(beta) e
//              S <- diag(exp(G_last)) S + k_restored^T v_new
//   backward:  y = (I + Akk^T diag(beta))^-1 (Aqk^T do + k_restored dS)    dv = diag(beta) y
//              dS <- diag(exp(G_last)) dS + q_decayed^T do - k_decayed^T dv
//              dbeta = rowsum(y * e)                                  no division: beta may be 0
//
// No inverse is left in the gradients of the pair matrices, and q, k and g get theirs from
//
//   dAqk = tril(do v_new^T)    dAkk = -tril(dv v_new^T, -1)
//   row_q = do S^T    row_k = -dv S^T    col = v_new dS^T            [C, K], S entering, dS leaving
//
// which are carried over the sub-blocks: token i of I collects k_tail of the J < I into its rows,
// token j of J q_head and k_head of the I > J into its column, and the accumulator decays by
// exp(sum of g) at every sub-block it crosses. head is G - Gs(I), tail is Ge(J) - G, so that no
// exponent is above 0. Pairs inside a sub-block multiply the decays between them.
//
// dg_t is the sum over all that decays by g_t: pairs with j < t <= i, rows i >= t with S, tokens
// j < t with dS, and S with dS. Pairs of sub-blocks are the only ones taken as a difference, of all
// that end from t on and those that begin there: what has to cancel are the same numbers.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "ffi/common/params.h"
#include "ffi/cpu/chunk.h"
#include "ffi/cpu/kernels.h"
#include "ffi/cpu/rows.h"
#include "ffi/cpu/tile.h"
#include "ffi/cpu/vec.h"

namespace jax_kda::cpu {
namespace {

// The sizes of one call's arrays. V is padded to whole strips.
template <class Isa>
struct GradSizes {
  static constexpr int kStrip = Isa::kStrip;

  explicit GradSizes(const FwdParams& p)
      : Kp(PaddedK(p)), Vp(RoundUp(p.V, kStrip)), K_strips((Kp + kStrip - 1) / kStrip) {}

  int64_t V_strips() const { return Vp / kStrip; }

  int64_t Kp, Vp, K_strips;
};

// What `Forward` keeps of a chunk for `Backward`.
template <class Isa>
struct KeptChunk {
  float* S;  // [K_strips, Vp, kStrip]  the state entering, V-first
  float* e;  // [V_strips, C, kStrip]

  static int64_t Size(const GradSizes<Isa>& n) {
    return n.K_strips * n.Vp * Isa::kStrip + kChunk * n.Vp;
  }
  static KeptChunk At(float* p, const GradSizes<Isa>& n) {
    return {p, p + n.K_strips * n.Vp * Isa::kStrip};
  }
};

template <class Isa>
struct GradScratch {
  PreparedChunk prepared;
  float* q;            // [C, Kp]  scaled
  float* k;            // [C, Kp]
  float* g;            // [C, Kp]  log decay
  float* decay;        // [C, Kp]  exp(g)
  float* heads;        // [kBlocks, 2 R, Kp]  q_head, then k_head
  float* k_tail;       // [C, Kp]
  float* k_down;       // [Kp, C]  of Prepare
  float* block_total;  // [kBlocks, Kp]
  float* block_decay;  // [kBlocks, Kp]  exp(block_total)
  float* before;       // [Kp]  of Prepare
  float* beta;         // [C]
  float* v_new;        // [C, kStrip]
  float* do_;          // [V_strips, C, kStrip]
  float* dv;           // [V_strips, C, kStrip]
  float* y;            // [C, kStrip]
  float* v_new_T;      // [Vp, C]
  float* dS;           // [K_strips, Vp, kStrip]  of the state leaving, V-first
  float* dAqk;         // [C, C]  entries above the diagonal are garbage and never read
  float* dAkk;         // [C, C]  and those on it
  float* row_q;        // [C, Kp]  S and earlier sub-blocks
  float* row_k;        // [C, Kp]  likewise
  float* col;          // [C, Kp]  later sub-blocks
  float* col_S;        // [C, Kp]  dS
  float* dg;           // [C, Kp]
  float* S_dS;         // [Kp]  what dg of every token has from S with dS
  float* dA_log;       // [Kp]  summands of this chunk
  float* ddt_bias;     // [Kp]
  float* row;          // [Kp]
  float* dbeta;        // [C]

  static int64_t Size(const GradSizes<Isa>& n) { return Fill(nullptr, n, nullptr); }
  static GradScratch At(float* p, const GradSizes<Isa>& n) {
    GradScratch s;
    Fill(p, n, &s);
    return s;
  }

 private:
  static int64_t Fill(float* p, const GradSizes<Isa>& n, GradScratch* s) {
    GradScratch unused;
    if (s == nullptr) s = &unused;
    int64_t size = RoundUp(PreparedChunk::Size(n.Kp), 16);
    if (p != nullptr) s->prepared = PreparedChunk::At(p, n.Kp);
    const auto take = [&](float*& array, int64_t count) {
      array = p == nullptr ? nullptr : p + size;
      size += RoundUp(count, 16);
    };
    const int64_t rows = kChunk * n.Kp, values = kChunk * n.Vp;
    take(s->q, rows);
    take(s->k, rows);
    take(s->g, rows);
    take(s->decay, rows);
    take(s->heads, 2 * rows);
    take(s->k_tail, rows);
    take(s->k_down, rows);
    take(s->block_total, kBlocks * n.Kp);
    take(s->block_decay, kBlocks * n.Kp);
    take(s->before, n.Kp);
    take(s->beta, kChunk);
    take(s->v_new, kChunk * Isa::kStrip);
    take(s->do_, values);
    take(s->dv, values);
    take(s->y, kChunk * Isa::kStrip);
    take(s->v_new_T, values);
    take(s->dS, n.K_strips * n.Vp * Isa::kStrip);
    take(s->dAqk, kChunk * kChunk);
    take(s->dAkk, kChunk * kChunk);
    take(s->row_q, rows);
    take(s->row_k, rows);
    take(s->col, rows);
    take(s->col_S, rows);
    take(s->dg, rows);
    take(s->S_dS, n.Kp);
    take(s->dA_log, n.Kp);
    take(s->ddt_bias, n.Kp);
    take(s->row, n.Kp);
    take(s->dbeta, kChunk);
    return size;
  }
};

template <class Isa>
struct ChunkGrad {
  using F = typename Isa::F;
  static constexpr int kLanes = Isa::kLanes;
  static constexpr int kRows = Isa::kRows;
  static constexpr int kStrip = Isa::kStrip;

  const FwdParams& p;
  const HeadTokens& x;
  const GradSizes<Isa>& n;
  const GradScratch<Isa>& s;
  const int64_t Kp = n.Kp;
  const int64_t rows = RoundUp(x.count, R);
  const int blocks = static_cast<int>(rows / R);

  // ---- forward

  void Forward(float* S, const KeptChunk<Isa>* kept) const {
    PrepareChunk();
    if (kept != nullptr) Transpose(S, kept->S);
    for (int64_t strip = 0; strip < n.V_strips(); ++strip) {
      float* e = kept != nullptr ? kept->e + strip * kChunk * kStrip : s.y;
      LoadValues(p.v, strip, e);
      ForwardStrip(S + strip * Kp * kStrip, e);
    }
  }

  // The forward's Prepare, with beta = 1, and what it has in passing.
  void PrepareChunk() const {
    const PreparedChunk& c = s.prepared;
    PrepareScratch block;
    const Prepare<Isa> prepare{p, x, block, c, Kp};
    block.k_down = s.k_down;
    block.block_total = s.block_total;
    block.before = s.before;
    std::fill(c.beta, c.beta + kChunk, 1.0f);
    std::fill(s.before, s.before + Kp, 0.0f);
    for (int I = 0; I < blocks; ++I) {
      const int64_t first = static_cast<int64_t>(I) * R * Kp;
      block.q = s.q + first;
      block.k = s.k + first;
      block.g = s.g + first;
      block.decay = s.decay + first;
      block.qk_up = s.heads + 2 * first;
      prepare.LoadBlock(I);
      prepare.DecayBlock(I);
      prepare.OffDiagonal(I);
      prepare.template DiagonalColumns<0>(I);
      if (I + 1 < blocks) prepare.ExtendKDown(I);
    }
    std::memcpy(s.k_tail, c.k_restored, rows * Kp * sizeof(float));  // not restored yet
    prepare.Restore(blocks);
    for (int64_t i = 0; i < rows; ++i) {  // products take whole diagonal blocks
      const int64_t end = RoundUp(i + 1, R);
      std::fill(c.Aqk + i * kChunk + i + 1, c.Aqk + i * kChunk + end, 0.0f);
      std::fill(c.Akk + i * kChunk + i, c.Akk + i * kChunk + end, 0.0f);
    }
    LoadBeta<Isa>(p, x, kChunk, s.beta);
  }

  // e: v on entry.
  void ForwardStrip(float* S, float* e) const {
    const PreparedChunk& c = s.prepared;
    for (int64_t i = 0; i < rows; i += kRows) {
      Tile<Isa, 2> tile;
      tile.Load(e + i * kStrip, kStrip);
      tile.template MultiplyAdd<true>(c.k_decayed + i * Kp, Kp, 1, S, kStrip, p.K);
      tile.template MultiplyAdd<true>(c.Akk + i * kChunk, kChunk, 1, s.v_new, kStrip, i);
      tile.SolveUnitLower(c.Akk + i * kChunk + i, kChunk, s.beta + i);
      tile.Store(e + i * kStrip, kStrip);
      tile.ScaleRows(s.beta + i);
      tile.Store(s.v_new + i * kStrip, kStrip);
    }
    for (int64_t i = 0; i < Kp; i += kRows) {
      Tile<Isa, 2> tile;
      tile.Zero();
      tile.MultiplyAdd(c.k_restored + i, 1, Kp, s.v_new, kStrip, rows);
      tile.AddScaledRows(c.S_decay + i, c.S_decay_low + i, S + i * kStrip, kStrip);
      tile.Store(S + i * kStrip, kStrip);
    }
  }

  // ---- backward

  void Backward(const BwdParams& b, const KeptChunk<Isa>& kept, float* dS,
                const ChunkGradients& to) const {
    PrepareChunk();
    for (int64_t i = 0; i < blocks * Kp; i += kLanes) {
      Isa::Store(s.block_decay + i, Isa::Exp(Isa::Load(s.block_total + i)));
    }
    Transpose(dS, s.dS);
    std::fill(s.dbeta, s.dbeta + kChunk, 0.0f);
    for (int64_t strip = 0; strip < n.V_strips(); ++strip) {
      const int64_t values = strip * kChunk * kStrip;
      LoadValues(b.do_, strip, s.do_ + values);
      BackwardStrip(kept.e + values, s.do_ + values, s.dv + values,
                    s.v_new_T + strip * kStrip * kChunk, dS + strip * Kp * kStrip);
      StoreValues(s.dv + values, strip, b.dv);
    }
    PairGradients();
    int64_t K_strip = 0;
    for (int64_t i = 0; i < Kp; i += kStrip, ++K_strip) {
      const float* S = kept.S + K_strip * n.Vp * kStrip;
      const float* dS_T = s.dS + K_strip * n.Vp * kStrip;
      if (Kp - i >= kStrip) {
        Channels<2>(i, S, dS_T);
      } else {
        Channels<1>(i, S, dS_T);
      }
    }
    for (int64_t i = 0; i < Kp; i += kLanes) {
      F dg = Isa::Load(s.S_dS + i);
      F after{};
      for (int I = blocks - 1; I >= 0; --I) BlockGradients(I, i, dg, after, to);
      AddGradientsWithState(i);
    }
    GateGradients(b, to);
    BetaGradients(b);
    if (to.last) {
      const int64_t h = x.hv / (p.HV / p.H);
      for (int64_t i = 0; i < x.count; ++i) {
        const int64_t offset = ((x.b * p.T + x.token + i) * p.H + h) * p.K;
        KeyGradient(p.q, offset, p.scale, to.dq + i * Kp, b.dq);
        KeyGradient(p.k, offset, 1.0f, to.dk + i * Kp, b.dk);
      }
    }
  }

  void BackwardStrip(const float* e, const float* do_, float* dv, float* v_new_T, float* dS) const {
    const PreparedChunk& c = s.prepared;
    for (int64_t i = rows - kRows; i >= 0; i -= kRows) {
      const int64_t after = i + kRows;
      Tile<Isa, 2> tile;
      tile.Zero();
      tile.MultiplyAdd(c.k_restored + i * Kp, Kp, 1, dS, kStrip, p.K);
      tile.MultiplyAdd(c.Aqk + i * kChunk + i, 1, kChunk, do_ + i * kStrip, kStrip, rows - i);
      tile.template MultiplyAdd<true>(c.Akk + after * kChunk + i, 1, kChunk, dv + after * kStrip,
                                      kStrip, rows - after);
      tile.SolveUnitUpper(c.Akk + i * kChunk + i, kChunk, s.beta + i);
      tile.Store(s.y + i * kStrip, kStrip);
      tile.ScaleRows(s.beta + i);
      tile.Store(dv + i * kStrip, kStrip);
    }
    for (int64_t i = 0; i < rows; ++i) {
      F sum{};
      for (int j = 0; j < kStrip; j += kLanes) {
        sum += Isa::Load(s.y + i * kStrip + j) * Isa::Load(e + i * kStrip + j);
      }
      s.dbeta[i] += Isa::Sum(sum);
      for (int j = 0; j < kStrip; ++j) v_new_T[j * kChunk + i] = s.beta[i] * e[i * kStrip + j];
    }
    for (int64_t i = 0; i < Kp; i += kRows) {
      Tile<Isa, 2> tile;
      tile.Zero();
      tile.MultiplyAdd(c.q_decayed + i, 1, Kp, do_, kStrip, rows);
      tile.template MultiplyAdd<true>(c.k_decayed + i, 1, Kp, dv, kStrip, rows);
      tile.AddScaledRows(c.S_decay + i, c.S_decay_low + i, dS + i * kStrip, kStrip);
      tile.Store(dS + i * kStrip, kStrip);
    }
  }

  // dAqk and dAkk.
  void PairGradients() const {
    for (int64_t i = 0; i < rows; i += kRows) {
      for (int64_t j = 0; j < i + kRows; j += kStrip) {
        Tile<Isa, 2> qk, kk;
        qk.Zero();
        for (int64_t strip = 0; strip < n.V_strips(); ++strip) {
          qk.MultiplyAdd(s.do_ + (strip * kChunk + i) * kStrip, kStrip, 1,
                         s.v_new_T + strip * kStrip * kChunk + j, kChunk, kStrip);
        }
        qk.Store(s.dAqk + i * kChunk + j, kChunk);
        kk.Zero();
        for (int64_t strip = 0; strip < n.V_strips(); ++strip) {
          kk.template MultiplyAdd<true>(s.dv + (strip * kChunk + i) * kStrip, kStrip, 1,
                                        s.v_new_T + strip * kStrip * kChunk + j, kChunk, kStrip);
        }
        kk.Store(s.dAkk + i * kChunk + j, kChunk);
      }
    }
  }

  // row_q, row_k, col, col_S and S_dS of kVecs vectors of channels from `channel` on. S and dS_T:
  // [Vp, kStrip].
  template <int kVecs>
  void Channels(int64_t channel, const float* S, const float* dS_T) const {
    const float* k_tail = s.k_tail + channel;
    for (int64_t i = 0; i < rows; i += kRows) {
      const int I = static_cast<int>(i / R);
      Tile<Isa, kVecs> q;
      q.Zero();
      for (int64_t strip = 0; strip < n.V_strips(); ++strip) {
        q.MultiplyAdd(s.do_ + (strip * kChunk + i) * kStrip, kStrip, 1, S + strip * kStrip * kStrip,
                      kStrip, kStrip);
      }
      for (int J = 0; J < I; ++J) {
        q.ScaleColumns(s.block_decay + J * Kp + channel);
        q.MultiplyAdd(s.dAqk + i * kChunk + J * R, kChunk, 1, k_tail + J * R * Kp, Kp, R);
      }
      q.Store(s.row_q + i * Kp + channel, Kp);

      Tile<Isa, kVecs> k;
      k.Zero();
      for (int64_t strip = 0; strip < n.V_strips(); ++strip) {
        k.template MultiplyAdd<true>(s.dv + (strip * kChunk + i) * kStrip, kStrip, 1,
                                     S + strip * kStrip * kStrip, kStrip, kStrip);
      }
      for (int J = 0; J < I; ++J) {
        k.ScaleColumns(s.block_decay + J * Kp + channel);
        k.MultiplyAdd(s.dAkk + i * kChunk + J * R, kChunk, 1, k_tail + J * R * Kp, Kp, R);
      }
      k.Store(s.row_k + i * Kp + channel, Kp);
    }

    for (int64_t i = 0; i < rows; i += kRows) {
      const int J = static_cast<int>(i / R);
      Tile<Isa, kVecs> col_S;
      col_S.Zero();
      for (int64_t strip = 0; strip < n.V_strips(); ++strip) {
        col_S.MultiplyAdd(s.v_new_T + strip * kStrip * kChunk + i, 1, kChunk,
                          dS_T + strip * kStrip * kStrip, kStrip, kStrip);
      }
      col_S.Store(s.col_S + i * Kp + channel, Kp);

      Tile<Isa, kVecs> col;
      col.Zero();
      for (int I = blocks - 1; I > J; --I) {
        const float* q_head = s.heads + I * 2 * R * Kp + channel;
        col.ScaleColumns(s.block_decay + I * Kp + channel);
        col.MultiplyAdd(s.dAqk + I * R * kChunk + i, 1, kChunk, q_head, Kp, R);
        col.MultiplyAdd(s.dAkk + I * R * kChunk + i, 1, kChunk, q_head + R * Kp, Kp, R);
      }
      col.Store(s.col + i * Kp + channel, Kp);
    }
    for (int64_t i = 0; i < kVecs * kLanes; i += kLanes) {
      F sum{};
      for (int64_t v = 0; v < p.V; ++v) {
        sum += Isa::Load(S + v * kStrip + i) * Isa::Load(dS_T + v * kStrip + i);
      }
      Isa::Store(s.S_dS + channel + i, sum * Isa::Load(s.prepared.S_decay + channel + i));
    }
  }

  // dq, dk and dg of sub-block I in the vector of channels from `channel` on. On entry: dg, what
  // crosses the border after the sub-block, without tokens with dS; `after`, the sum of g after it.
  // On return the same for the one before.
  void BlockGradients(int I, int64_t channel, F& dg, F& after, const ChunkGradients& to) const {
    const int64_t first = static_cast<int64_t>(I) * R * Kp + channel;
    const float* q_head = s.heads + 2 * static_cast<int64_t>(I) * R * Kp + channel;
    const float* k_head = q_head + R * Kp;
    F q[R], k[R], dq[R], dk[R], dG[R], inside[R];
    F up{};
    for (int t = 0; t < R; ++t) {
      const int64_t i = first + t * Kp;
      up += Isa::Load(s.g + i);
      const F head = Isa::Exp(up);
      const F row_q = Isa::Load(s.row_q + i);
      const F row_k = Isa::Load(s.row_k + i);
      q[t] = Isa::Load(s.q + i);
      k[t] = Isa::Load(s.k + i);
      dq[t] = head * row_q;
      dk[t] = head * row_k;
      dG[t] = Isa::Load(q_head + t * Kp) * row_q + Isa::Load(k_head + t * Kp) * row_k;
      inside[t] = F{};
    }
    const F restored = Isa::Exp(after);
    F down{};
    for (int t = R - 1; t >= 0; --t) {
      const int64_t i = first + t * Kp;
      const F col = Isa::Load(s.col + i);
      dk[t] += Isa::Exp(down) * (Isa::Load(s.col_S + i) * restored + col);
      dG[t] -= Isa::Load(s.k_tail + i) * col;
      down += Isa::Load(s.g + i);
    }
    after += Isa::Load(s.block_total + I * Kp + channel);
    const int64_t corner = static_cast<int64_t>(I) * R * (kChunk + 1);
    for (int j = 0; j < R; ++j) {
      const float on = s.dAqk[corner + j * (kChunk + 1)];  // no decay, so nothing for g
      dq[j] += k[j] * on;
      dk[j] += q[j] * on;
      F decay = Isa::Splat(1.0f);
      F pairs[R];  // of j, by i
      for (int i = j + 1; i < R; ++i) {
        const float dqk = s.dAqk[corner + i * kChunk + j];
        const float dkk = s.dAkk[corner + i * kChunk + j];
        decay *= Isa::Load(s.decay + first + i * Kp);
        const F k_decayed = decay * k[j];
        dq[i] += k_decayed * dqk;
        dk[i] += k_decayed * dkk;
        const F by_k = decay * (q[i] * dqk + k[i] * dkk);
        dk[j] += by_k;
        pairs[i] = by_k * k[j];
      }
      F crossing{};
      for (int t = R - 1; t > j; --t) {
        crossing += pairs[t];
        inside[t] += crossing;
      }
    }
    for (int t = R - 1; t >= 0; --t) {
      const int64_t i = first + t * Kp;
      dg += dG[t];
      Isa::Store(s.dg + i, dg + inside[t]);
      Isa::Store(to.dq + i, to.first ? dq[t] : Isa::Load(to.dq + i) + dq[t]);
      Isa::Store(to.dk + i, to.first ? dk[t] : Isa::Load(to.dk + i) + dk[t]);
    }
  }

  // What dg has from earlier tokens with dS. Nothing crosses a decay of 0, but what differences
  // leave there is not always 0, and a gate as low as that would multiply it by 1e4; NaN stays.
  void AddGradientsWithState(int64_t channel) const {
    F sum{};
    for (int64_t i = channel; i < channel + rows * Kp; i += Kp) {
      const F dg = Isa::Load(s.dg + i) + sum;
      Isa::Store(s.dg + i, Isa::Load(s.decay + i) == F{} ? dg * 0.0f : dg);
      sum += Isa::Load(s.prepared.k_restored + i) * Isa::Load(s.col_S + i);
    }
  }

  // s.dg, by the log decay -> by g as it is given; and the summands of the gate's parameters.
  void GateGradients(const BwdParams& b, const ChunkGradients& to) const {
    const int64_t head = x.b * p.T + x.token;
    if (p.gate != Gate::kActivated) {
      for (int64_t i = 0; i < Kp; i += kLanes) {
        Isa::Store(s.dA_log + i, F{});
        Isa::Store(s.ddt_bias + i, F{});
      }
      const float A = p.A_log == nullptr ? 1.0f : std::exp(p.A_log[x.b * p.A_log_stride + x.hv]);
      const float* bias =
          p.dt_bias == nullptr ? nullptr : p.dt_bias + x.b * p.dt_bias_stride + x.hv * p.K;
      for (int64_t t = 0; t < x.count; ++t) {
        LoadRow(p.g_dtype, p.g, ((head + t) * p.HV + x.hv) * p.K, p.K, Kp, s.row);
        if (bias != nullptr) {
          for (int64_t i = 0; i < p.K; ++i) s.row[i] += bias[i];
        }
        for (int64_t i = 0; i < Kp; i += kLanes) {
          const F z = Isa::Load(s.row + i);
          const F g = Isa::Load(s.g + t * Kp + i);
          const F dg = Isa::Load(s.dg + t * Kp + i);
          const bool softplus = p.gate == Gate::kSoftplus;
          const F dz = softplus ? Isa::Sigmoid(z) * dg * -A : dg * g * Isa::Sigmoid(z * -A) * A;
          Isa::Store(s.dA_log + i, Isa::Load(s.dA_log + i) + (softplus ? dg * g : dz * z));
          Isa::Store(s.ddt_bias + i, Isa::Load(s.ddt_bias + i) + dz);
          Isa::Store(s.dg + t * Kp + i, dz);
        }
      }
      if (to.dA_log != nullptr) {
        for (int64_t i = 0; i < p.K; ++i) *to.dA_log += s.dA_log[i];
      }
      if (to.ddt_bias != nullptr) {
        for (int64_t i = 0; i < p.K; ++i) to.ddt_bias[i] += s.ddt_bias[i];
      }
    }
    for (int64_t t = 0; t < x.count; ++t) {
      StoreRow(p.g_dtype, s.dg + t * Kp, p.K, b.dg, ((head + t) * p.HV + x.hv) * p.K);
    }
  }

  void BetaGradients(const BwdParams& b) const {
    const auto offset = [&](int64_t t) { return (x.b * p.T + x.token + t) * p.HV + x.hv; };
    if (p.beta_mode != BetaMode::kProbability) {
      alignas(64) float complement[kChunk] = {};  // 1 - sigmoid(beta)
      for (int64_t t = 0; t < x.count; ++t) {
        LoadRow(p.beta_dtype, p.beta, offset(t), 1, 1, complement + t);
      }
      for (int64_t t = 0; t < kChunk; t += kLanes) {
        const F factor = Isa::Load(s.beta + t) * Isa::Sigmoid(-Isa::Load(complement + t));
        Isa::Store(s.dbeta + t, Isa::Load(s.dbeta + t) * factor);
      }
    }
    for (int64_t t = 0; t < x.count; ++t) {
      StoreRow(p.beta_dtype, s.dbeta + t, 1, b.dbeta, offset(t));
    }
  }

  // The gradient by a row of q or k as it is given, from that by the normalised and scaled row.
  void KeyGradient(const void* from, int64_t offset, float scale, float* d, void* to) const {
    F projection{};
    float factor = scale;
    if (p.l2norm) {
      LoadRow(p.dtype, from, offset, p.K, Kp, s.row);
      F squares{}, dots{};
      for (int64_t i = 0; i < Kp; i += kLanes) {
        const F row = Isa::Load(s.row + i);
        squares += row * row;
        dots += row * Isa::Load(d + i);
      }
      const float r = 1.0f / std::sqrt(Isa::Sum(squares) + 1e-6f);
      factor *= r;
      projection = Isa::Splat(factor * r * r * Isa::Sum(dots));
    }
    for (int64_t i = 0; i < Kp; i += kLanes) {
      const F dx = Isa::Load(d + i) * factor;
      Isa::Store(d + i, p.l2norm ? dx - Isa::Load(s.row + i) * projection : dx);
    }
    StoreRow(p.dtype, d, p.K, to, offset);
  }

  // ---- strips

  // [V_strips, Kp, kStrip] -> [K_strips, Vp, kStrip].
  void Transpose(const float* from, float* to) const {
    for (int64_t k = 0; k < Kp; ++k) {
      float* column = to + k / kStrip * n.Vp * kStrip + k % kStrip;
      for (int64_t strip = 0; strip < n.V_strips(); ++strip) {
        const float* row = from + (strip * Kp + k) * kStrip;
        for (int j = 0; j < kStrip; ++j) column[(strip * kStrip + j) * kStrip] = row[j];
      }
    }
  }

  int64_t ValueOffset(int64_t strip, int64_t t) const {
    return ((x.b * p.T + x.token + t) * p.HV + x.hv) * p.V + strip * kStrip;
  }
  int64_t Width(int64_t strip) const { return std::min<int64_t>(kStrip, p.V - strip * kStrip); }

  // Rows of v, or of what has its shape and dtype; zeros past the chunk's tokens.
  void LoadValues(const void* from, int64_t strip, float* to) const {
    for (int64_t t = 0; t < x.count; ++t) {
      LoadRow(p.dtype, from, ValueOffset(strip, t), Width(strip), kStrip, to + t * kStrip);
    }
    std::fill(to + x.count * kStrip, to + rows * kStrip, 0.0f);
  }
  void StoreValues(const float* from, int64_t strip, void* to) const {
    for (int64_t t = 0; t < x.count; ++t) {
      StoreRow(p.dtype, from + t * kStrip, Width(strip), to, ValueOffset(strip, t));
    }
  }
};

// ---- the kernel

template <class Isa>
int64_t KeptSize(const FwdParams& p) {
  return KeptChunk<Isa>::Size(GradSizes<Isa>(p));
}

template <class Isa>
int64_t GradScratchSize(const FwdParams& p) {
  return GradScratch<Isa>::Size(GradSizes<Isa>(p));
}

template <class Isa>
void RunForward(const FwdParams& p, const HeadTokens& x, float* S, float* kept, float* scratch) {
  const GradSizes<Isa> n(p);
  const auto s = GradScratch<Isa>::At(scratch, n);
  KeptChunk<Isa> to;
  if (kept != nullptr) to = KeptChunk<Isa>::At(kept, n);
  ChunkGrad<Isa>{p, x, n, s}.Forward(S, kept == nullptr ? nullptr : &to);
}

template <class Isa>
void RunBackward(const BwdParams& b, const HeadTokens& x, const float* kept, float* dS,
                 const ChunkGradients& to, float* scratch) {
  const GradSizes<Isa> n(b.fwd);
  const auto s = GradScratch<Isa>::At(scratch, n);
  const auto from = KeptChunk<Isa>::At(const_cast<float*>(kept), n);
  ChunkGrad<Isa>{b.fwd, x, n, s}.Backward(b, from, dS, to);
}

template <class Isa>
constexpr ChunkGradKernel MakeChunkGradKernel() {
  return {Isa::kStrip, KeptSize<Isa>,   GradScratchSize<Isa>,
          PaddedK,     RunForward<Isa>, RunBackward<Isa>};
}

}  // namespace
}  // namespace jax_kda::cpu
