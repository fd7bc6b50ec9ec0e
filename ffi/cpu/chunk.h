// One chunk of C = 64 tokens of one value head, in float32: `Prepare` makes everything that does
// not need the state, `Scan` moves one strip of the state's V columns over the chunk. Strips are
// independent of each other.
//
//   prepare:  q_decayed = scale q exp(G)      k_decayed = beta k exp(G)
//             k_restored = k exp(G_last - G)
//             Aqk = tril(scale q k^T exp(G_i - G_j))    Akk = tril(beta_i k k^T exp(G_i - G_j), -1)
//   scan:     v_new = (I + Akk)^-1 (beta v - k_decayed S)
//             o = q_decayed S + Aqk v_new,    S <- diag(exp(G_last)) S + k_restored^T v_new
//
// beta is folded into the rows of k_decayed and Akk. (I + Akk) is never inverted: forward
// substitution costs the same as the product with its inverse and is backward stable. S is held
// K-first, [K, strip], the way the products read it.
//
// Useful matrix FLOPs, what benchmarks count: 6 C K V + 2 C (C + 1) (K + V) + C^3 / 3.
//
// Every exponent is at most 0, whatever the gate. A chunk is cut into sub-blocks of R = 8 tokens
// and g is summed from the sub-block's start. Pairs in one sub-block multiply the decays between
// them; for pairs of sub-blocks J < I, with s and e for start and end,
//     exp(G_i - G_j) = exp(G_i - Gs(I)) exp(Gs(I) - Ge(J)) exp(Ge(J) - G_j)
// and nothing is ever divided by a decay. Entries above the diagonal are garbage and never read, so
// no token sees a later one, not even as NaN.
#pragma once

#include <algorithm>
#include <cstdint>

#include "ffi/common/params.h"
#include "ffi/cpu/kernels.h"
#include "ffi/cpu/rows.h"
#include "ffi/cpu/tile.h"
#include "ffi/cpu/vec.h"

namespace jax_kda::cpu {
namespace {

inline constexpr int R = 8;  // tokens of a sub-block; a multiple of every Isa::kRows
inline constexpr int kBlocks = kChunk / R;

// What Prepare hands to Scan. Rows past the chunk's tokens, up to a whole sub-block, are zero: they
// leave S alone.
struct PreparedChunk {
  float* q_decayed;   // [C, Kp]
  float* k_decayed;   // [C, Kp]
  float* k_restored;  // [C, Kp]
  float* Aqk;         // [C, C]
  float* Akk;         // [C, C]
  // exp(G_last) = S_decay + S_decay_low, [Kp] each. Weak gates hardly move S: with one float32, the
  // rounding of a decay near 1 would add up over the chunks.
  float* S_decay;
  float* S_decay_low;
  float* beta;  // [C]

  static int64_t Size(int64_t Kp) {
    return 3 * kChunk * Kp + 2 * kChunk * kChunk + 2 * Kp + kChunk;
  }

  static PreparedChunk At(float* p, int64_t Kp) {
    PreparedChunk c;
    c.q_decayed = p;
    c.k_decayed = c.q_decayed + kChunk * Kp;
    c.k_restored = c.k_decayed + kChunk * Kp;
    c.Aqk = c.k_restored + kChunk * Kp;
    c.Akk = c.Aqk + kChunk * kChunk;
    c.S_decay = c.Akk + kChunk * kChunk;
    c.S_decay_low = c.S_decay + Kp;
    c.beta = c.S_decay_low + Kp;
    return c;
  }
};

// Scratch of Prepare. The rows belong to the current sub-block I.
struct PrepareScratch {
  float* q;            // [R, Kp]  scaled
  float* k;            // [R, Kp]
  float* g;            // [R, Kp]  log decay
  float* decay;        // [R, Kp]  exp(g)
  float* qk_up;        // [2 R, Kp]  q, then beta k, each times exp(G - Gs(I))
  float* k_down;       // [Kp, C]  k exp(Gs(I) - G) of the sub-blocks before I, transposed
  float* block_total;  // [kBlocks, Kp]  sum of g over each sub-block
  float* before;       // [Kp]  sum of g over the sub-blocks before I

  static int64_t Size(int64_t Kp) { return (6 * R + kChunk + kBlocks + 1) * Kp; }

  static PrepareScratch At(float* p, int64_t Kp) {
    PrepareScratch s;
    s.q = p;
    s.k = s.q + R * Kp;
    s.g = s.k + R * Kp;
    s.decay = s.g + R * Kp;
    s.qk_up = s.decay + R * Kp;
    s.k_down = s.qk_up + 2 * R * Kp;
    s.block_total = s.k_down + kChunk * Kp;
    s.before = s.block_total + kBlocks * Kp;
    return s;
  }
};

// ---- prepare

template <class Isa>
struct Prepare {
  using F = typename Isa::F;
  static constexpr int kLanes = Isa::kLanes;

  const FwdParams& p;
  const HeadTokens& x;
  const PrepareScratch& s;
  const PreparedChunk& c;
  const int64_t Kp;

  void Run() const {
    LoadBeta<Isa>(p, x, kChunk, c.beta);
    for (int64_t i = 0; i < Kp; i += kLanes) Isa::Store(s.before + i, F{});
    const int blocks = static_cast<int>((x.count + R - 1) / R);
    for (int I = 0; I < blocks; ++I) {
      LoadBlock(I);
      DecayBlock(I);
      OffDiagonal(I);
      DiagonalColumns<0>(I);
      if (I + 1 < blocks) ExtendKDown(I);
    }
    Restore(blocks);
  }

  // q, k and g of sub-block I: converted, normalised, activated. Rows past the chunk's tokens are
  // zero.
  void LoadBlock(int I) const {
    const int64_t h = x.hv / (p.HV / p.H);
    for (int i = 0; i < R; ++i) {
      const int64_t n = I * R + i < x.count ? p.K : 0;
      const int64_t token = x.token + (n > 0 ? I * R + i : 0);
      const int64_t row = x.b * p.T + token;
      float* q = s.q + i * Kp;
      float* k = s.k + i * Kp;
      float* g = s.g + i * Kp;
      LoadRow(p.dtype, p.q, (row * p.H + h) * p.K, n, Kp, q);
      LoadRow(p.dtype, p.k, (row * p.H + h) * p.K, n, Kp, k);
      LoadRow(p.g_dtype, p.g, (row * p.HV + x.hv) * p.K, n, Kp, g);
      if (token + R < p.T) {
        PrefetchRow(p.dtype, p.q, ((row + R) * p.H + h) * p.K, p.K);
        PrefetchRow(p.dtype, p.k, ((row + R) * p.H + h) * p.K, p.K);
        PrefetchRow(p.g_dtype, p.g, ((row + R) * p.HV + x.hv) * p.K, p.K);
      }
      PrefetchRow(p.dtype, p.v, (row * p.HV + x.hv) * p.V, p.V);  // for Scan
      ScaleRow<Isa>(p, q, p.scale);
      if (p.l2norm) ScaleRow<Isa>(p, k, 1.0f);
      if (n > 0) ActivateRow<Isa>(p, x, g);
    }
  }

  // All decays of sub-block I. k_restored holds k exp(Ge(I) - G) until Restore.
  void DecayBlock(int I) const {
    const int64_t rows = static_cast<int64_t>(I) * R * Kp;
    for (int64_t i = 0; i < Kp; i += kLanes) {
      const F before = Isa::Load(s.before + i);
      const F exp_before = Isa::Exp(before);
      F up{};
      for (int t = 0; t < R; ++t) {
        const F g = Isa::Load(s.g + t * Kp + i);
        up += g;
        const F exp_up = Isa::Exp(up);
        const F q_up = Isa::Load(s.q + t * Kp + i) * exp_up;
        const F k_up = Isa::Load(s.k + t * Kp + i) * exp_up * c.beta[I * R + t];
        Isa::Store(s.decay + t * Kp + i, Isa::Exp(g));
        Isa::Store(s.qk_up + t * Kp + i, q_up);
        Isa::Store(s.qk_up + (R + t) * Kp + i, k_up);
        Isa::Store(c.q_decayed + rows + t * Kp + i, q_up * exp_before);
        Isa::Store(c.k_decayed + rows + t * Kp + i, k_up * exp_before);
      }
      Isa::Store(s.block_total + I * Kp + i, up);
      Isa::Store(s.before + i, before + up);
      F down{};
      for (int t = R - 1; t >= 0; --t) {
        const F k = Isa::Load(s.k + t * Kp + i);
        Isa::Store(c.k_restored + rows + t * Kp + i, k * Isa::Exp(down));
        down += Isa::Load(s.g + t * Kp + i);
      }
    }
  }

  // Rows of sub-block I against all earlier tokens. Columns are computed in whole vectors: those
  // past 8 I are garbage that the diagonal block overwrites or nobody reads.
  void OffDiagonal(int I) const {
    const int64_t columns = static_cast<int64_t>(I) * R;
    for (int r = 0; r < 2 * R; r += Isa::kRows) {
      float* to = r < R ? c.Aqk + (columns + r) * kChunk : c.Akk + (columns + r - R) * kChunk;
      int64_t j = 0;
      for (; j + kLanes < columns; j += 2 * kLanes) OffDiagonalTile<2>(r, j, to);
      if (j < columns) OffDiagonalTile<1>(r, j, to);
    }
  }

  template <int kVecs>
  void OffDiagonalTile(int row, int64_t column, float* to) const {
    Tile<Isa, kVecs> tile;
    tile.Zero();
    tile.MultiplyAdd(s.qk_up + row * Kp, Kp, 1, s.k_down + column, kChunk, p.K);
    tile.Store(to + column, kChunk);
  }

  // Column j of the diagonal block: k_j walks down the rows, losing one decay at each.
  template <int j>
  void DiagonalColumns(int I) const {
    F qk[R], kk[R];
#pragma GCC unroll 8
    for (int i = j; i < R; ++i) qk[i] = kk[i] = F{};
    for (int64_t n = 0; n < Kp; n += kLanes) {
      F kj = Isa::Load(s.k + j * Kp + n);
      qk[j] += Isa::Load(s.q + j * Kp + n) * kj;
#pragma GCC unroll 8
      for (int i = j + 1; i < R; ++i) {
        kj *= Isa::Load(s.decay + i * Kp + n);
        qk[i] += Isa::Load(s.q + i * Kp + n) * kj;
        kk[i] += Isa::Load(s.k + i * Kp + n) * kj;
      }
    }
    const int64_t corner = static_cast<int64_t>(I) * R * (kChunk + 1);
#pragma GCC unroll 8
    for (int i = j; i < R; ++i) {
      c.Aqk[corner + i * kChunk + j] = Isa::Sum(qk[i]);
      if (i > j) c.Akk[corner + i * kChunk + j] = Isa::Sum(kk[i]) * c.beta[I * R + i];
    }
    if constexpr (j + 1 < R) DiagonalColumns<j + 1>(I);
  }

  // k_down from Gs(I) to Gs(I + 1): the old columns decay over sub-block I, whose own columns are
  // added.
  void ExtendKDown(int I) const {
    const float* k = c.k_restored + static_cast<int64_t>(I) * R * Kp;
    float* total = s.block_total + I * Kp;
    alignas(64) float decay[16];
    for (int64_t n = 0; n < Kp; n += kLanes) {
      Isa::Store(decay, Isa::Exp(Isa::Load(total + n)));
      for (int lane = 0; lane < kLanes; ++lane) {
        float* row = s.k_down + (n + lane) * kChunk;
        for (int j = 0; j < I * R; j += kLanes) {
          Isa::Store(row + j, Isa::Load(row + j) * decay[lane]);
        }
        for (int t = 0; t < R; ++t) row[I * R + t] = k[t * Kp + n + lane];
      }
    }
  }

  // k_restored of each sub-block over the sub-blocks after it, and exp(G_last).
  void Restore(int blocks) const {
    for (int64_t i = 0; i < Kp; i += kLanes) {
      F after{};
      for (int I = blocks - 1; I >= 0; --I) {
        const F factor = Isa::Exp(after);
        for (int t = 0; t < R; ++t) {
          float* k = c.k_restored + (static_cast<int64_t>(I) * R + t) * Kp + i;
          Isa::Store(k, Isa::Load(k) * factor);
        }
        after += Isa::Load(s.block_total + I * Kp + i);
      }
      F low;
      Isa::Store(c.S_decay + i, Isa::Exp(after, low));
      Isa::Store(c.S_decay_low + i, low);
    }
  }
};

// ---- scan

template <class Isa>
struct Scan {
  static constexpr int kRows = Isa::kRows;
  static constexpr int kStrip = Isa::kStrip;

  const FwdParams& p;
  const HeadTokens& x;
  const PreparedChunk& c;
  const int64_t Kp;
  const int64_t column;  // of V, where the strip begins
  float* S;              // [Kp, kStrip], updated
  float* v;              // [C, kStrip]  beta v, then v_new
  float* o;              // [C, kStrip]

  void Run() const {
    const int64_t rows = RoundUp(x.count, R);
    LoadV(rows);
    for (int64_t i = 0; i < rows; i += kRows) {
      Tile<Isa, 2> tile;
      tile.Load(v + i * kStrip, kStrip);
      tile.template MultiplyAdd<true>(c.k_decayed + i * Kp, Kp, 1, S, kStrip, p.K);
      tile.template MultiplyAdd<true>(c.Akk + i * kChunk, kChunk, 1, v, kStrip, i);
      tile.SolveUnitLower(c.Akk + i * kChunk + i, kChunk);
      tile.Store(v + i * kStrip, kStrip);
    }
    for (int64_t i = 0; i < rows; i += kRows) {
      Tile<Isa, 2> tile;
      tile.Zero();
      tile.MultiplyAdd(c.q_decayed + i * Kp, Kp, 1, S, kStrip, p.K);
      tile.MultiplyAdd(c.Aqk + i * kChunk, kChunk, 1, v, kStrip, i);
      tile.MultiplyAddLower(c.Aqk + i * kChunk + i, kChunk, v + i * kStrip, kStrip);
      tile.Store(o + i * kStrip, kStrip);
    }
    for (int64_t i = 0; i < Kp; i += kRows) {
      Tile<Isa, 2> tile;
      tile.Zero();  // not S: it would be rounded 64 times a chunk instead of once
      tile.MultiplyAdd(c.k_restored + i, 1, Kp, v, kStrip, rows);
      tile.AddScaledRows(c.S_decay + i, c.S_decay_low + i, S + i * kStrip, kStrip);
      tile.Store(S + i * kStrip, kStrip);
    }
    StoreO();
  }

  int64_t Width() const { return std::min<int64_t>(kStrip, p.V - column); }
  int64_t Offset(int64_t i) const {
    return ((x.b * p.T + x.token + i) * p.HV + x.hv) * p.V + column;
  }

  void LoadV(int64_t rows) const {
    const int64_t width = Width();
    for (int64_t i = 0; i < x.count; ++i) {
      float* row = v + i * kStrip;
      LoadRow(p.dtype, p.v, Offset(i), width, kStrip, row);
      for (int j = 0; j < kStrip; j += Isa::kLanes) {
        Isa::Store(row + j, Isa::Load(row + j) * c.beta[i]);
      }
    }
    std::fill(v + x.count * kStrip, v + rows * kStrip, 0.0f);
  }

  void StoreO() const {
    const int64_t width = Width();
    for (int64_t i = 0; i < x.count; ++i) {
      StoreRow(p.dtype, o + i * kStrip, width, p.o, Offset(i));
    }
  }
};

// ---- the kernel

int64_t PreparedSize(const FwdParams& p) { return PreparedChunk::Size(PaddedK(p)); }
int64_t PrepareScratchSize(const FwdParams& p) { return PrepareScratch::Size(PaddedK(p)); }

template <class Isa>
int64_t ScanScratchSize(const FwdParams&) {
  return 2 * kChunk * Isa::kStrip;  // v and o of one strip
}

template <class Isa>
void RunPrepare(const FwdParams& p, const HeadTokens& x, float* prepared, float* scratch) {
  const int64_t Kp = PaddedK(p);
  Prepare<Isa>{p, x, PrepareScratch::At(scratch, Kp), PreparedChunk::At(prepared, Kp), Kp}.Run();
}

template <class Isa>
void RunScan(const FwdParams& p, const HeadTokens& x, float* prepared, int64_t column, float* S,
             float* scratch) {
  const int64_t Kp = PaddedK(p);
  float* v = scratch;
  float* o = scratch + kChunk * Isa::kStrip;
  Scan<Isa>{p, x, PreparedChunk::At(prepared, Kp), Kp, column, S, v, o}.Run();
}

template <class Isa>
constexpr ChunkKernel MakeChunkKernel() {
  return {Isa::kStrip, PreparedSize,    PrepareScratchSize, ScanScratchSize<Isa>,
          PaddedK,     RunPrepare<Isa>, RunScan<Isa>};
}

}  // namespace
}  // namespace jax_kda::cpu
