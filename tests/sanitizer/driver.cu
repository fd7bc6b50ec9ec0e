// Calls the CUDA launchers on buffers of exactly the contract's sizes, each an allocation of its
// own, so that compute-sanitizer sees every access outside them. run.sh runs it under each tool.
//
// Without an argument, outputs and workspace hold NaN before each launch, so that what the kernels
// do not write shows. With --raw they are left as allocated, for initcheck; but for `o`, since
// initcheck does not see what the copy engine writes and would report that it is read here (nor
// does it look at what the copy engine reads: of images, only NaN tells). With --plant there is
// one configuration, whose `o` is one row short: memcheck has to report it.
//
// The exit status counts the configurations with wrong results.
#include <cuda_runtime.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "configs.h"
#include "ffi/cuda/launch.h"

namespace jax_kda {
namespace {

void Check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(status));
  std::exit(100);
}

struct CudaFree {
  void operator()(std::byte* p) const { Check(cudaFree(p), "cudaFree"); }
};
using Buffer = std::unique_ptr<std::byte, CudaFree>;

Buffer Allocate(size_t bytes) {
  void* p = nullptr;
  if (bytes > 0) Check(cudaMalloc(&p, bytes), "cudaMalloc");
  return Buffer(static_cast<std::byte*>(p));
}

Buffer Upload(const Bytes& bytes) {
  Buffer buffer = Allocate(bytes.size());
  Check(cudaMemcpy(buffer.get(), bytes.data(), bytes.size(), cudaMemcpyHostToDevice), "upload");
  return buffer;
}

Bytes Download(const Buffer& buffer, size_t size) {
  Bytes bytes(size);
  Check(cudaMemcpy(bytes.data(), buffer.get(), size, cudaMemcpyDeviceToHost), "download");
  return bytes;
}

void Poison(const Buffer& buffer, size_t bytes) {  // 0xff bytes are a NaN in bf16 and in f32
  if (bytes > 0) Check(cudaMemset(buffer.get(), 0xff, bytes), "poison");
}

enum class Op { kChunk, kRecurrent };

std::string Run(const Config& c, Op op, bool poison, int64_t missing_rows_of_o) {
  const Operands x = MakeOperands(c);
  const Buffer q = Upload(x.q), k = Upload(x.k), v = Upload(x.v), g = Upload(x.g);
  const Buffer beta = Upload(x.beta), A_log = Upload(x.A_log), dt_bias = Upload(x.dt_bias);
  const Buffer offsets = Upload(x.offsets), initial_state = Upload(x.initial_state);
  const Buffer state_indices = Upload(x.state_indices);
  const Buffer output_state_indices = Upload(x.output_state_indices);
  const Buffer checkpoint_indices = Upload(x.checkpoint_indices);

  FwdParams p = MakeParams(c);
  const size_t o_bytes = (c.values() - missing_rows_of_o * c.HV * c.V) * SizeOf(c.dtype);
  const size_t state_bytes = c.has_final_state() ? c.states() * SizeOf(c.state_dtype) : 0;
  if (op == Op::kChunk) {
    p.workspace_bytes =
        ChunkFwdWorkspaceBytes(c.B, c.T, c.HV, p.M, c.offsets_step != 0, c.segment_chunks);
  }
  const Buffer o = Allocate(o_bytes), own_final_state = Allocate(c.in_place ? 0 : state_bytes);
  const Buffer& final_state = c.in_place ? initial_state : own_final_state;
  const Buffer workspace = Allocate(p.workspace_bytes);
  Poison(o, o_bytes);
  if (poison) {
    Poison(own_final_state, c.in_place ? 0 : state_bytes);
    Poison(workspace, p.workspace_bytes);
  }

  p.q = q.get();
  p.k = k.get();
  p.v = v.get();
  p.g = g.get();
  p.beta = beta.get();
  p.A_log = reinterpret_cast<const float*>(A_log.get());
  p.dt_bias = reinterpret_cast<const float*>(dt_bias.get());
  p.offsets = reinterpret_cast<const int32_t*>(offsets.get());
  p.initial_state = initial_state.get();
  p.state_indices = reinterpret_cast<const int32_t*>(state_indices.get());
  p.output_state_indices = reinterpret_cast<const int32_t*>(output_state_indices.get());
  p.checkpoint_indices = reinterpret_cast<const int32_t*>(checkpoint_indices.get());
  p.o = o.get();
  p.final_state = c.has_final_state() ? final_state.get() : nullptr;
  p.workspace = workspace.get();
  const ffi::Error error = op == Op::kChunk ? LaunchChunkFwdSm90(p, cudaStreamPerThread)
                                            : LaunchRecurrentFwd(p, cudaStreamPerThread);
  if (error.failure()) return error.message();
  Check(cudaStreamSynchronize(cudaStreamPerThread), c.name);
  if (missing_rows_of_o > 0) return "";
  return Judge(c, Download(o, o_bytes), Download(final_state, state_bytes));
}

}  // namespace
}  // namespace jax_kda

int main(int argc, char** argv) {
  const std::string mode = argc > 1 ? argv[1] : "";
  if (argc > 2 || (!mode.empty() && mode != "--raw" && mode != "--plant")) {
    std::fprintf(stderr, "usage: %s [--raw | --plant]\n", argv[0]);
    return 101;
  }
  if (mode == "--plant") {
    for (const auto op : {jax_kda::Op::kChunk, jax_kda::Op::kRecurrent}) {
      const std::string fault =
          jax_kda::Run(jax_kda::kPlanted, op, /*poison=*/true, /*missing_rows_of_o=*/1);
      std::printf("planted: %s\n", fault.empty() ? "launched" : fault.c_str());
    }
    return 0;
  }
  std::vector<jax_kda::Config> configs = jax_kda::kConfigs;
  configs.insert(configs.end(), jax_kda::kPoolConfigs.begin(), jax_kda::kPoolConfigs.end());
  int failures = 0;
  for (const auto op : {jax_kda::Op::kChunk, jax_kda::Op::kRecurrent}) {
    const char* name = op == jax_kda::Op::kChunk ? "chunk" : "recurrent";
    for (const jax_kda::Config& config : configs) {
      const std::string fault =
          jax_kda::Run(config, op, /*poison=*/mode != "--raw", /*missing_rows_of_o=*/0);
      std::printf("%-4s %s: %s%s%s\n", fault.empty() ? "ok" : "FAIL", name, config.name,
                  fault.empty() ? "" : ": ", fault.c_str());
      failures += !fault.empty();
    }
  }
  return failures;
}
