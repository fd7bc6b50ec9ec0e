// Flushes denormal floats to zero on this thread while in scope. Decays make denormals by the
// thousand, each costs the processor a hundred cycles, and XLA sets the mode on some of its threads
// only: results must not depend on which.
#pragma once

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace jax_kda::cpu {

#if defined(__x86_64__)

class FlushDenormals {
 public:
  FlushDenormals() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ | kFlushToZero | kDenormalsAreZero); }
  ~FlushDenormals() { _mm_setcsr(saved_); }
  FlushDenormals(const FlushDenormals&) = delete;
  FlushDenormals& operator=(const FlushDenormals&) = delete;

 private:
  static constexpr unsigned kFlushToZero = 0x8000;
  static constexpr unsigned kDenormalsAreZero = 0x0040;
  unsigned saved_;
};

#else

class FlushDenormals {};

#endif

}  // namespace jax_kda::cpu
