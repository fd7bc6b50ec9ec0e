// A fixed-width float vector in the compiler's own vector extension, and the elementary functions
// of the gates on it.
//
// This header, tile.h, rows.h, chunk.h, chunk_grad.h and recurrent.h are compiled once for each
// instruction set: kernels_baseline.cc, kernels_avx2.cc and kernels_avx512.cc. Their unnamed
// namespaces keep the copies apart; of functions with linkage the linker would keep one, for any of
// the sets.
#pragma once

#include <cstdint>
#include <cstring>

namespace jax_kda::cpu {
namespace {

// Written out because the extension's attributes do not reliably take a template argument.
// `may_alias` as for the compiler's own vector types: they are read from and written to plain float
// arrays.
template <int kLanes>
struct VecTypes;

template <>
struct VecTypes<4> {
  typedef float F __attribute__((vector_size(16), may_alias));
  typedef uint32_t U __attribute__((vector_size(16), may_alias));
};
template <>
struct VecTypes<8> {
  typedef float F __attribute__((vector_size(32), may_alias));
  typedef uint32_t U __attribute__((vector_size(32), may_alias));
};
template <>
struct VecTypes<16> {
  typedef float F __attribute__((vector_size(64), may_alias));
  typedef uint32_t U __attribute__((vector_size(64), may_alias));
};

template <int kLanes_>
struct Simd {
  static constexpr int kLanes = kLanes_;
  using F = typename VecTypes<kLanes>::F;
  using U = typename VecTypes<kLanes>::U;

  // For arrays of the kernels, aligned to 64 bytes, at offsets that are multiples of kLanes.
  static F Load(const float* p) { return *reinterpret_cast<const F*>(p); }
  static void Store(float* p, F x) { *reinterpret_cast<F*>(p) = x; }

  // For any address.
  static F LoadUnaligned(const float* p) {
    F x;
    std::memcpy(&x, p, sizeof(x));
    return x;
  }
  static void StoreUnaligned(float* p, F x) { std::memcpy(p, &x, sizeof(x)); }

  static F Splat(float x) { return x - F{}; }       // x - 0 is x, also for -0
  static F Max(F x, F y) { return x < y ? y : x; }  // NaN in x is kept
  static F Abs(F x) { return FromBits(Bits(x) & 0x7fffffffu); }

  static U Bits(F x) {
    U bits;
    std::memcpy(&bits, &x, sizeof(x));
    return bits;
  }
  static F FromBits(U bits) {
    F x;
    std::memcpy(&x, &bits, sizeof(x));
    return x;
  }

  static float Sum(F x) {
    if constexpr (kLanes > 4) {
      typename VecTypes<kLanes / 2>::F half[2];
      std::memcpy(half, &x, sizeof(x));
      return Simd<kLanes / 2>::Sum(half[0] + half[1]);
    } else {
      return (x[0] + x[2]) + (x[1] + x[3]);
    }
  }

  // exp(x), relative error below 1e-7; 0 below exp(-87.3), where float32 stops being normal. Made
  // for x <= 0, all that the kernel needs: it is right up to 88 and infinite from 89 on. NaN stays
  // NaN.
  static F Exp(F x) {
    F power;
    const F m = Expm1Reduced(x, power);
    return x < kExpMin ? F{} : (m + 1.0f) * power;
  }

  // exp(x) = high + low, with more bits than float32 has for x near 0.
  static F Exp(F x, F& low) {
    F power;
    const F m = Expm1Reduced(x, power);
    const F high = x < kExpMin ? F{} : (m + 1.0f) * power;
    low = Abs(x) < 0.3f ? m - (high - 1.0f) : F{};  // the power is 1 within ln 2 / 2 = 0.346
    return high;
  }

  // log(1 + t) for 0 <= t <= 1 with small relative error: 2 atanh(t / (2 + t)).
  static F Log1pUnit(F t) {
    const F s = t / (t + 2.0f);
    const F z = s * s;
    F p = z * 0.1400642f + 0.14000814f;
    p = p * z + 0.20010769f;
    p = p * z + 0.33333208f;
    const F twice = s + s;
    return twice * (z * p) + twice;
  }

  static F Sigmoid(F x) {
    const F t = Exp(-Abs(x));
    return (x < 0.0f ? t : Splat(1.0f)) / (t + 1.0f);
  }

  static F Softplus(F x) { return Max(x, F{}) + Log1pUnit(Exp(-Abs(x))); }

 private:
  static constexpr float kExpMin = -87.3f;

  // exp(x) = (1 + result) power. x = n ln 2 + r with |r| <= ln 2 / 2, power = 2^n; 1.5 * 2^23
  // rounds to an integer and leaves it in the low bits. For x < kExpMin the power is garbage.
  static F Expm1Reduced(F x, F& power) {
    constexpr float kRound = 12582912.0f;
    x = 89.0f < x ? Splat(89.0f) : x;
    const F shifted = x * 1.44269504f + kRound;
    const F n = shifted - kRound;
    const F r =
        (x - n * 0.693359375f) + n * 2.12194440e-4f;  // ln 2 in two parts: n * first is exact
    F p = r * 1.38146e-3f + 8.36872e-3f;
    p = p * r + 4.166839e-2f;
    p = p * r + 1.6666521e-1f;
    p = p * r + 4.9999993e-1f;
    power = FromBits((Bits(shifted) << 23) + (127u << 23));
    return r * r * p + r;
  }
};

// bfloat16 as stored: the upper half of a float32.
struct BF16 {
  uint16_t bits;
};

inline float ToFloat(float x) { return x; }
inline float ToFloat(BF16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float y;
  std::memcpy(&y, &bits, sizeof(y));
  return y;
}

inline void FromFloat(float x, float& y) { y = x; }
inline void FromFloat(float x, BF16& y) {  // to nearest even
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const uint32_t quiet_nan = (bits >> 16) | 0x40;  // rounding could carry a NaN into infinity
  y.bits = static_cast<uint16_t>((bits & 0x7fffffff) > 0x7f800000 ? quiet_nan : rounded);
}

}  // namespace
}  // namespace jax_kda::cpu
