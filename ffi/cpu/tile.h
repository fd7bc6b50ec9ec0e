// The register tile: kRows x (kVecs vectors) of accumulators, and the few ways a chunk uses it.
// Everything that is a matrix product on the CPU is one of these loops.
//
// A is read one element at a time (a broadcast), B one vector at a time, so A may be stored either
// way round.
#pragma once

#include <cstdint>

#include "ffi/cpu/vec.h"

namespace jax_kda::cpu {
namespace {

// Instruction sets differ in the vector's length and in how many accumulators the registers hold: 8
// x 2 of 32 vector registers leave room for B and the broadcasts, 4 x 2 of 16.
template <int kLanes_, int kRows_>
struct Isa : Simd<kLanes_> {
  static constexpr int kRows = kRows_;
  static constexpr int kStrip = 2 * kLanes_;  // columns of a two-vector tile
};

template <class Isa, int kVecs>
struct Tile {
  static constexpr int kRows = Isa::kRows;
  static constexpr int kLanes = Isa::kLanes;
  using F = typename Isa::F;

  F acc[kRows][kVecs];

  [[gnu::always_inline]] void Zero() {
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 2
      for (int j = 0; j < kVecs; ++j) acc[i][j] = F{};
    }
  }

  [[gnu::always_inline]] void Load(const float* x, int64_t row_stride) {
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 2
      for (int j = 0; j < kVecs; ++j) acc[i][j] = Isa::Load(x + i * row_stride + j * kLanes);
    }
  }

  // acc += diag(high + low) X.
  [[gnu::always_inline]] void AddScaledRows(const float* high, const float* low, const float* x,
                                            int64_t row_stride) {
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 2
      for (int j = 0; j < kVecs; ++j) {
        const F xij = Isa::Load(x + i * row_stride + j * kLanes);
        acc[i][j] = xij * high[i] + (xij * low[i] + acc[i][j]);
      }
    }
  }

  [[gnu::always_inline]] void Store(float* x, int64_t row_stride) const {
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 2
      for (int j = 0; j < kVecs; ++j) Isa::Store(x + i * row_stride + j * kLanes, acc[i][j]);
    }
  }

  // acc += A B (or acc -= A B), n terms: A[i, t] at a[i * a_row + t * a_term], B[t, :] at b + t *
  // b_row.
  template <bool kSubtract = false>
  [[gnu::always_inline]] void MultiplyAdd(const float* a, int64_t a_row, int64_t a_term,
                                          const float* b, int64_t b_row, int64_t n) {
    for (int64_t t = 0; t < n; ++t, a += a_term, b += b_row) {
      F bt[kVecs];
#pragma GCC unroll 2
      for (int j = 0; j < kVecs; ++j) bt[j] = Isa::Load(b + j * kLanes);
#pragma GCC unroll 8
      for (int i = 0; i < kRows; ++i) {
        const F ait = Isa::Splat(a[i * a_row]);
#pragma GCC unroll 2
        for (int j = 0; j < kVecs; ++j) {
          if constexpr (kSubtract) {
            acc[i][j] -= ait * bt[j];
          } else {
            acc[i][j] += ait * bt[j];
          }
        }
      }
    }
  }

  // acc += tril(A) B for a kRows x kRows block of A: entries above the diagonal are not read, so a
  // NaN in a later row of B cannot reach an earlier row.
  [[gnu::always_inline]] void MultiplyAddLower(const float* a, int64_t a_row, const float* b,
                                               int64_t b_row) {
#pragma GCC unroll 8
    for (int t = 0; t < kRows; ++t) {
#pragma GCC unroll 8
      for (int i = t; i < kRows; ++i) {
#pragma GCC unroll 2
        for (int j = 0; j < kVecs; ++j) {
          acc[i][j] += a[i * a_row + t] * Isa::Load(b + t * b_row + j * kLanes);
        }
      }
    }
  }

  // acc <- (I + tril(L, -1))^-1 acc for a kRows x kRows block of L, by forward substitution.
  [[gnu::always_inline]] void SolveUnitLower(const float* l, int64_t l_row) {
#pragma GCC unroll 8
    for (int t = 0; t < kRows; ++t) {
#pragma GCC unroll 8
      for (int i = t + 1; i < kRows; ++i) {
#pragma GCC unroll 2
        for (int j = 0; j < kVecs; ++j) acc[i][j] -= l[i * l_row + t] * acc[t][j];
      }
    }
  }

  // acc <- (I + tril(L, -1) diag(beta))^-1 acc for a kRows x kRows block of L.
  [[gnu::always_inline]] void SolveUnitLower(const float* l, int64_t l_row, const float* beta) {
#pragma GCC unroll 8
    for (int t = 0; t < kRows; ++t) {
#pragma GCC unroll 2
      for (int j = 0; j < kVecs; ++j) {
        const F x = acc[t][j] * beta[t];
#pragma GCC unroll 8
        for (int i = t + 1; i < kRows; ++i) acc[i][j] -= l[i * l_row + t] * x;
      }
    }
  }

  // acc <- (I + tril(L, -1)^T diag(beta))^-1 acc for a kRows x kRows block of L.
  [[gnu::always_inline]] void SolveUnitUpper(const float* l, int64_t l_row, const float* beta) {
#pragma GCC unroll 8
    for (int t = kRows - 1; t >= 0; --t) {
#pragma GCC unroll 2
      for (int j = 0; j < kVecs; ++j) {
        const F x = acc[t][j] * beta[t];
#pragma GCC unroll 8
        for (int i = 0; i < t; ++i) acc[i][j] -= l[t * l_row + i] * x;
      }
    }
  }

  // acc <- acc diag(factors).
  [[gnu::always_inline]] void ScaleColumns(const float* factors) {
#pragma GCC unroll 2
    for (int j = 0; j < kVecs; ++j) {
      const F factor = Isa::Load(factors + j * kLanes);
#pragma GCC unroll 8
      for (int i = 0; i < kRows; ++i) acc[i][j] *= factor;
    }
  }

  // rows of acc times a factor each.
  [[gnu::always_inline]] void ScaleRows(const float* factors) {
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 2
      for (int j = 0; j < kVecs; ++j) acc[i][j] *= factors[i];
    }
  }
};

}  // namespace
}  // namespace jax_kda::cpu
