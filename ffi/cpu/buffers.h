// Scratch memory of the kernels.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>

namespace jax_kda::cpu {

// n float arrays of `size`, each aligned to 64 bytes. Throws std::bad_alloc.
class Buffers {
 public:
  Buffers(int64_t n, int64_t size)
      : stride_((size + 15) / 16 * 16),
        bytes_(n * stride_ * sizeof(float)),
        data_(static_cast<float*>(::operator new(bytes_, kAlignment))) {}

  void Zero() { std::memset(data_.get(), 0, bytes_); }
  float* operator[](int64_t i) const { return data_.get() + i * stride_; }

 private:
  static constexpr std::align_val_t kAlignment{64};

  struct Free {
    void operator()(float* p) const { ::operator delete(p, kAlignment); }
  };

  int64_t stride_;
  size_t bytes_;
  std::unique_ptr<float, Free> data_;
};

}  // namespace jax_kda::cpu
