// Calls the CUDA launchers on buffers of exactly the contract's sizes, each an allocation of its
// own, so that compute-sanitizer sees every access outside them. run.sh runs it under each tool.
//
// Without an argument, outputs and workspace hold NaN before each launch, so that what the kernels
// do not write shows. With --raw results that the copy engine has no part in are left as allocated,
// for initcheck, which does not see what it writes: the others and the workspace would be reported
// as read before they are written, and only NaN tells. With --plant there is one configuration,
// whose `o`, or `dv`, is one row short: memcheck has to report it.
//
// The exit status counts the configurations with wrong results.
#include <cuda_runtime.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
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

void SetInputs(FwdParams& p, const Operands& x, std::vector<Buffer>& buffers) {
  const auto upload = [&](const Bytes& bytes) {
    buffers.push_back(Upload(bytes));
    return buffers.back().get();
  };
  p.q = upload(x.q);
  p.k = upload(x.k);
  p.v = upload(x.v);
  p.g = upload(x.g);
  p.beta = upload(x.beta);
  p.A_log = reinterpret_cast<const float*>(upload(x.A_log));
  p.dt_bias = reinterpret_cast<const float*>(upload(x.dt_bias));
  p.offsets = reinterpret_cast<const int32_t*>(upload(x.offsets));
  p.initial_state = upload(x.initial_state);
}

// What is wrong with a gradient, or "": finite, NaN in malformed rows, and 0 for tokens of no
// sequence where it has `size` numbers a token; a size of 0: it is not by token, and `per_row`
// numbers a row.
std::string JudgeGradient(const Config& c, const char* name, const Bytes& bytes, DType dtype,
                          int64_t size, int64_t per_row) {
  for (int64_t i = 0; i < static_cast<int64_t>(bytes.size() / SizeOf(dtype)); ++i) {
    const float x = At(bytes, dtype, i);
    const int64_t row = size > 0 ? i / size / c.T : i / per_row;
    const bool good = IsMalformed(c, row)                               ? std::isnan(x)
                      : size > 0 && !InSequence(c, row, i / size % c.T) ? x == 0.0f
                                                                        : std::isfinite(x);
    if (!good) return std::string(name) + " has " + std::to_string(x) + " at " + std::to_string(i);
  }
  return "";
}

std::string RunGradient(const Config& c, int64_t missing_rows_of_dv) {
  std::vector<Buffer> buffers;
  BwdParams b{};
  b.fwd = MakeParams(c);
  FwdParams& p = b.fwd;
  SetInputs(p, MakeOperands(c), buffers);
  std::mt19937 generator(4321);
  const Buffer do_ = Upload(Random(c.values(), c.dtype, &generator));
  const Buffer dfinal_state =
      Upload(c.has_final_state() ? Random(c.states(), c.state_dtype, &generator) : Bytes());
  b.do_ = do_.get();
  b.dfinal_state = dfinal_state.get();
  b.dfinal_state_dtype = c.state_dtype;

  struct Gradient {
    const char* name;
    int64_t count;
    DType dtype;
    int64_t size, per_row;
  };
  const int64_t tokens = c.B * c.T, keys = c.H * c.K, values = c.HV * c.V, gates = c.HV * c.K;
  const bool biased = p.A_log != nullptr;
  const Gradient gradients[] = {
      {"dq", tokens * keys, c.dtype, keys, 0},
      {"dk", tokens * keys, c.dtype, keys, 0},
      {"dv", (tokens - missing_rows_of_dv) * values, c.dtype, values, 0},
      {"dg", tokens * gates, c.g_dtype, gates, 0},
      {"dbeta", tokens * c.HV, c.beta_dtype, c.HV, 0},
      {"dA_log", biased ? c.B * c.HV : 0, DType::kF32, 0, c.HV},
      {"ddt_bias", biased ? c.B * gates : 0, DType::kF32, 0, gates},
      {"dinitial_state", c.has_initial_state() ? c.states() : 0, c.state_dtype, 0,
       c.M() * c.HV * c.V * c.K},
  };
  std::vector<Buffer> results;
  for (const Gradient& d : gradients) {
    results.push_back(Allocate(d.count * SizeOf(d.dtype)));
    // As `o`: all but dbeta and the last three may leave by the copy engine.
    Poison(results.back(), d.count * SizeOf(d.dtype));
  }
  b.dq = results[0].get();
  b.dk = results[1].get();
  b.dv = results[2].get();
  b.dg = results[3].get();
  b.dbeta = results[4].get();
  b.dA_log = reinterpret_cast<float*>(results[5].get());
  b.ddt_bias = reinterpret_cast<float*>(results[6].get());
  b.dinitial_state = results[7].get();
  p.workspace_bytes =
      ChunkBwdWorkspaceBytes(c.B, c.T, c.H, c.HV, p.M, c.offsets_step != 0, c.segment_chunks);
  const Buffer workspace = Allocate(p.workspace_bytes);
  Poison(workspace, p.workspace_bytes);
  p.workspace = workspace.get();
  const ffi::Error error = LaunchChunkBwdSm90(b, cudaStreamPerThread);
  if (error.failure()) return error.message();
  Check(cudaStreamSynchronize(cudaStreamPerThread), c.name);
  if (missing_rows_of_dv > 0) return "";
  for (size_t i = 0; i < results.size(); ++i) {
    const Gradient& d = gradients[i];
    const std::string fault = JudgeGradient(
        c, d.name, Download(results[i], d.count * SizeOf(d.dtype)), d.dtype, d.size, d.per_row);
    if (!fault.empty()) return fault;
  }
  return "";
}

std::string Run(const Config& c, Op op, bool poison, int64_t missing_rows_of_o) {
  const Operands x = MakeOperands(c);
  std::vector<Buffer> inputs;
  FwdParams p = MakeParams(c);
  SetInputs(p, x, inputs);
  const Buffer state_indices = Upload(x.state_indices);
  const Buffer output_state_indices = Upload(x.output_state_indices);
  const Buffer checkpoint_indices = Upload(x.checkpoint_indices);

  const size_t o_bytes = (c.values() - missing_rows_of_o * c.HV * c.V) * SizeOf(c.dtype);
  const size_t state_bytes = c.has_final_state() ? c.states() * SizeOf(c.state_dtype) : 0;
  if (op == Op::kChunk) {
    p.workspace_bytes = ChunkFwdWorkspaceBytes(c.B, c.T, c.HV, p.M, c.offsets_step != 0,
                                               c.segment_chunks, c.slice_chunks);
  }
  const Buffer o = Allocate(o_bytes), own_final_state = Allocate(c.in_place ? 0 : state_bytes);
  const Buffer& final_state = c.in_place ? inputs.back() : own_final_state;
  const Buffer workspace = Allocate(p.workspace_bytes);
  Poison(o, o_bytes);
  Poison(workspace, p.workspace_bytes);
  if (poison) Poison(own_final_state, c.in_place ? 0 : state_bytes);

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
    const std::string fault = jax_kda::RunGradient(jax_kda::kPlanted, /*missing_rows_of_dv=*/1);
    std::printf("planted: %s\n", fault.empty() ? "launched" : fault.c_str());
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
  for (const jax_kda::Config& config : jax_kda::kConfigs) {
    if (config.K != 128 || config.V != 128) continue;  // there is no kernel for them
    const std::string fault = jax_kda::RunGradient(config, /*missing_rows_of_dv=*/0);
    std::printf("%-4s gradient: %s%s%s\n", fault.empty() ? "ok" : "FAIL", config.name,
                fault.empty() ? "" : ": ", fault.c_str());
    failures += !fault.empty();
  }
  return failures;
}
