// From run-time values to compile-time constants. A value without a match is an error, never a
// silent no-op.
#pragma once

#include <cstdint>
#include <sstream>
#include <string_view>
#include <type_traits>

#include "ffi/common/params.h"
#include "xla/ffi/api/ffi.h"

namespace jax_kda {

namespace ffi = ::xla::ffi;

// Calls f(std::integral_constant<int, X>{}) for the X in Xs that equals value; f returns
// ffi::Error.
template <int... Xs, class F>
ffi::Error DispatchInt(std::string_view name, int64_t value, F&& f) {
  ffi::Error error;
  const bool matched =
      ((value == Xs && ((error = f(std::integral_constant<int, Xs>{})), true)) || ...);
  if (matched) return error;
  std::ostringstream message;
  const char* separator = "";
  message << "`" << name << "` must be one of [";
  ((message << separator << Xs, separator = ", "), ...);
  message << "]; got " << value;
  return ffi::Error(ffi::ErrorCode::kUnimplemented, message.str());
}

// Calls f(std::true_type{}) or f(std::false_type{}).
template <class F>
ffi::Error DispatchBool(bool value, F&& f) {
  return value ? f(std::true_type{}) : f(std::false_type{});
}

// Calls f(Tag<T>{}), T being BF16 or F32: each platform names its own element types.
template <class T>
struct Tag {
  using type = T;
};

template <class BF16, class F32, class F>
ffi::Error DispatchDtype(DType dtype, F&& f) {
  return dtype == DType::kBF16 ? f(Tag<BF16>{}) : f(Tag<F32>{});
}

}  // namespace jax_kda
