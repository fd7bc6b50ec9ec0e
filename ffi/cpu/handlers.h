#pragma once

#include "xla/ffi/api/c_api.h"

extern "C" XLA_FFI_Error* KdaChunkFwd(XLA_FFI_CallFrame* call_frame);
extern "C" XLA_FFI_Error* KdaChunkBwd(XLA_FFI_CallFrame* call_frame);
extern "C" XLA_FFI_Error* KdaRecurrentFwd(XLA_FFI_CallFrame* call_frame);
