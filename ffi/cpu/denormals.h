// Flushes denormal floats to zero on this thread while in scope. Decays make denormals by the
// thousand, each costs the processor a hundred cycles, and XLA sets the mode on some of its threads
// only: results must not depend on which.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace jax_kda::cpu {

#if defined(__x86_64__)
using FloatMode = unsigned;
inline constexpr FloatMode kFlushMode = 0x8040;  // FTZ and DAZ
inline FloatMode GetFloatMode() { return _mm_getcsr(); }
inline void SetFloatMode(FloatMode mode) { _mm_setcsr(mode); }
#elif defined(__aarch64__)
using FloatMode = uint64_t;
inline constexpr FloatMode kFlushMode = 1 << 24;  // FZ
inline FloatMode GetFloatMode() {
  FloatMode mode;
  asm volatile("mrs %0, fpcr" : "=r"(mode));
  return mode;
}
inline void SetFloatMode(FloatMode mode) { asm volatile("msr fpcr, %0" : : "r"(mode)); }
#else
using FloatMode = int;
inline constexpr FloatMode kFlushMode = 0;
inline FloatMode GetFloatMode() { return 0; }
inline void SetFloatMode(FloatMode) {}
#endif

class FlushDenormals {
 public:
  FlushDenormals() : saved_(GetFloatMode()) { SetFloatMode(saved_ | kFlushMode); }
  ~FlushDenormals() { SetFloatMode(saved_); }
  FlushDenormals(const FlushDenormals&) = delete;
  FlushDenormals& operator=(const FlushDenormals&) = delete;

 private:
  FloatMode saved_;
};

}  // namespace jax_kda::cpu
