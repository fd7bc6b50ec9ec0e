// Calls the CUDA launcher on buffers of exactly the contract's sizes, each an allocation of its
// own, so that compute-sanitizer sees every access outside them. run.sh runs it under each tool.
//
// Without an argument, outputs and workspace hold NaN before each launch, so that what the kernels
// do not write shows. With --raw they are left as allocated, for initcheck. With --plant there is
// one configuration, whose `o` is one row short: memcheck has to report it.
//
// A configuration passes when every output is finite, or NaN throughout in the rows whose offsets
// are malformed, and 0 for tokens of no sequence. The exit status counts those that did not.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "ffi/common/params.h"
#include "ffi/cuda/launch.h"

namespace jax_kda {
namespace {

constexpr int64_t kHeadSize = 128;

void Check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(status));
  std::exit(100);
}

struct CudaFree {
  void operator()(void* p) const { Check(cudaFree(p), "cudaFree"); }
};
using Buffer = std::unique_ptr<void, CudaFree>;

Buffer Allocate(size_t bytes) {
  void* p = nullptr;
  if (bytes > 0) Check(cudaMalloc(&p, bytes), "cudaMalloc");
  return Buffer(p);
}

Buffer Upload(const void* data, size_t bytes) {
  Buffer buffer = Allocate(bytes);
  Check(cudaMemcpy(buffer.get(), data, bytes, cudaMemcpyHostToDevice), "upload");
  return buffer;
}

size_t SizeOf(DType dtype) { return dtype == DType::kBF16 ? 2 : 4; }

struct Normal {
  float mean = 0;
  float deviation = 1;
};

// n values mean + deviation * normal, none above `limit`.
Buffer Random(int64_t n, DType dtype, Normal normal, std::mt19937* generator, float limit = 1e30f) {
  std::normal_distribution<float> draw(normal.mean, normal.deviation);
  std::vector<float> f32(n);
  for (float& x : f32) x = std::fmin(draw(*generator), limit);
  if (dtype == DType::kF32) return Upload(f32.data(), n * sizeof(float));
  std::vector<__nv_bfloat16> bf16(n);
  for (int64_t i = 0; i < n; ++i) bf16[i] = __float2bfloat16(f32[i]);
  return Upload(bf16.data(), n * sizeof(__nv_bfloat16));
}

std::vector<float> Download(const Buffer& buffer, int64_t n, DType dtype) {
  std::vector<float> f32(n);
  if (dtype == DType::kF32) {
    Check(cudaMemcpy(f32.data(), buffer.get(), n * 4, cudaMemcpyDeviceToHost), "download");
    return f32;
  }
  std::vector<uint16_t> bits(n);
  Check(cudaMemcpy(bits.data(), buffer.get(), n * 2, cudaMemcpyDeviceToHost), "download");
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t word = uint32_t{bits[i]} << 16;
    std::memcpy(&f32[i], &word, 4);
  }
  return f32;
}

enum class State { kNone, kFinal, kBoth };  // neither state; a final one; an initial one too

struct Config {
  const char* name;
  int64_t B, T, H, HV;
  Gate gate = Gate::kLowerBound;
  BetaMode beta_mode = BetaMode::kSigmoid;
  bool l2norm = true;
  bool biased = true;  // A_log and dt_bias are given (raw gates)
  DType g_dtype = DType::kBF16;
  DType beta_dtype = DType::kBF16;
  DType state_dtype = DType::kF32;
  State state = State::kBoth;
  int64_t offsets_step = 0;
  std::vector<int32_t> offsets = {};
  std::vector<int64_t> malformed_rows = {};
  float gate_mean = 0;
};

int64_t SequencesPerRow(const Config& c) {
  const int64_t per_row = static_cast<int64_t>(c.offsets.size()) / c.B;
  return c.offsets_step == 0 ? 1 : c.offsets_step == 1 ? per_row - 1 : per_row / 2;
}

bool IsMalformed(const Config& c, int64_t row) {
  for (int64_t r : c.malformed_rows) {
    if (r == row) return true;
  }
  return false;
}

// Whether token t of a well-formed row belongs to a sequence.
bool InSequence(const Config& c, int64_t row, int64_t t) {
  if (c.offsets_step == 0) return true;
  const int64_t M = SequencesPerRow(c);
  const int32_t* offsets = c.offsets.data() + row * (c.offsets_step == 1 ? M + 1 : 2 * M);
  for (int64_t m = 0; m < M; ++m) {
    if (offsets[m * c.offsets_step] <= t && t < offsets[m * c.offsets_step + 1]) return true;
  }
  return false;
}

// What is wrong with the outputs of a configuration, or "".
std::string Judge(const Config& c, const std::vector<float>& o, const std::vector<float>& states) {
  for (size_t i = 0; i < o.size(); ++i) {
    const int64_t token = static_cast<int64_t>(i) / (c.HV * kHeadSize);
    const int64_t row = token / c.T, t = token % c.T;
    const bool good = IsMalformed(c, row)      ? std::isnan(o[i])
                      : !InSequence(c, row, t) ? o[i] == 0.0f
                                               : std::isfinite(o[i]);
    if (!good) {
      return "o[" + std::to_string(i) + "] (row " + std::to_string(row) + ", token " +
             std::to_string(t) + ") is " + std::to_string(o[i]);
    }
  }
  const int64_t row_size = SequencesPerRow(c) * c.HV * kHeadSize * kHeadSize;
  for (size_t i = 0; i < states.size(); ++i) {
    const int64_t row = static_cast<int64_t>(i) / row_size;
    if (IsMalformed(c, row) ? !std::isnan(states[i]) : !std::isfinite(states[i])) {
      return "final_state[" + std::to_string(i) + "] is " + std::to_string(states[i]);
    }
  }
  return "";
}

std::string Run(const Config& c, bool poison, int64_t missing_rows_of_o) {
  std::mt19937 generator(1234);
  const int64_t K = kHeadSize, V = kHeadSize, M = SequencesPerRow(c), tokens = c.B * c.T;
  const int64_t states = c.B * M * c.HV * V * K;
  const bool raw_gate = c.gate != Gate::kActivated;
  const Normal unit, small{0, 0.09f};

  Buffer q = Random(tokens * c.H * K, DType::kBF16, c.l2norm ? unit : small, &generator);
  Buffer k = Random(tokens * c.H * K, DType::kBF16, c.l2norm ? unit : small, &generator);
  Buffer v = Random(tokens * c.HV * V, DType::kBF16, unit, &generator);
  Buffer g = Random(tokens * c.HV * K, c.g_dtype, Normal{c.gate_mean, 1}, &generator,
                    raw_gate ? 1e30f : 0.0f);
  Buffer beta =
      Random(tokens * c.HV, c.beta_dtype,
             c.beta_mode == BetaMode::kProbability ? Normal{0.5f, 0.1f} : unit, &generator);
  const bool biased = c.biased && raw_gate;
  Buffer A_log = biased ? Random(c.HV, DType::kF32, unit, &generator) : nullptr;
  Buffer dt_bias = biased ? Random(c.HV * K, DType::kF32, unit, &generator) : nullptr;
  Buffer offsets = c.offsets_step == 0 ? nullptr : Upload(c.offsets.data(), c.offsets.size() * 4);
  Buffer initial_state =
      c.state == State::kBoth ? Random(states, c.state_dtype, unit, &generator) : nullptr;

  const size_t o_bytes = (tokens - missing_rows_of_o) * c.HV * V * 2;
  const size_t state_bytes = c.state == State::kNone ? 0 : states * SizeOf(c.state_dtype);
  Buffer o = Allocate(o_bytes);
  Buffer final_state = Allocate(state_bytes);

  ChunkFwdParams params{};
  params.B = c.B;
  params.T = c.T;
  params.H = c.H;
  params.HV = c.HV;
  params.K = K;
  params.V = V;
  params.M = M;
  params.scale = 0.088388f;
  params.lower_bound = c.gate == Gate::kLowerBound ? -5.0f : 0.0f;
  params.gate = c.gate;
  params.beta_mode = c.beta_mode;
  params.l2norm = c.l2norm;
  params.dtype = DType::kBF16;
  params.g_dtype = c.g_dtype;
  params.beta_dtype = c.beta_dtype;
  params.state_dtype = c.state_dtype;
  params.q = q.get();
  params.k = k.get();
  params.v = v.get();
  params.g = g.get();
  params.beta = beta.get();
  params.A_log = static_cast<const float*>(A_log.get());
  params.dt_bias = static_cast<const float*>(dt_bias.get());
  params.offsets = static_cast<const int32_t*>(offsets.get());
  params.offsets_step = c.offsets_step;
  params.initial_state = initial_state.get();
  params.o = o.get();
  params.final_state = final_state.get();
  params.workspace_bytes = ChunkFwdWorkspaceBytes(c.B, c.T, c.HV, M, c.offsets_step != 0);
  Buffer workspace = Allocate(params.workspace_bytes);
  params.workspace = static_cast<std::byte*>(workspace.get());

  if (poison) {  // 0xff bytes are a NaN in bf16 and in f32
    Check(cudaMemset(o.get(), 0xff, o_bytes), "poison o");
    if (state_bytes > 0) Check(cudaMemset(final_state.get(), 0xff, state_bytes), "poison state");
    Check(cudaMemset(workspace.get(), 0xff, params.workspace_bytes), "poison workspace");
  }
  const xla::ffi::Error error = LaunchChunkFwdSm90(params, cudaStreamPerThread);
  if (error.failure()) return error.message();
  Check(cudaStreamSynchronize(cudaStreamPerThread), c.name);
  if (missing_rows_of_o > 0) return "";
  return Judge(
      c, Download(o, tokens * c.HV * V, DType::kBF16),
      state_bytes == 0 ? std::vector<float>{} : Download(final_state, states, c.state_dtype));
}

std::vector<Config> Configs() {
  // clang-format off
  std::vector<Config> configs = {
      {.name = "one token", .B = 2, .T = 1, .H = 1, .HV = 1},
      {.name = "one short of a chunk, softplus gate, no state",
       .B = 1, .T = 63, .H = 2, .HV = 2, .gate = Gate::kSoftplus, .state = State::kNone},
      {.name = "one past a chunk, activated f32 gate, f32 beta, bf16 state",
       .B = 1, .T = 65, .H = 1, .HV = 2, .gate = Gate::kActivated, .beta_mode = BetaMode::kProbability,
       .l2norm = false, .g_dtype = DType::kF32, .beta_dtype = DType::kF32,
       .state_dtype = DType::kBF16, .gate_mean = -1},
      {.name = "strong activated gate, two-sigmoid beta, a final state only",
       .B = 1, .T = 130, .H = 1, .HV = 1, .gate = Gate::kActivated, .beta_mode = BetaMode::kTwoSigmoid,
       .state = State::kFinal, .gate_mean = -60},
      {.name = "raw gate without parameters, f32 g, bf16 state",
       .B = 2, .T = 191, .H = 2, .HV = 4, .biased = false, .g_dtype = DType::kF32,
       .state_dtype = DType::kBF16},
      {.name = "softplus gate, f32 g and beta, grouped value heads",
       .B = 1, .T = 200, .H = 2, .HV = 8, .gate = Gate::kSoftplus, .g_dtype = DType::kF32,
       .beta_dtype = DType::kF32},
      {.name = "more chains than multiprocessors", .B = 2, .T = 129, .H = 70, .HV = 70},
      {.name = "more chains than multiprocessors, softplus gate, bf16 state",
       .B = 3, .T = 65, .H = 48, .HV = 48, .gate = Gate::kSoftplus, .state_dtype = DType::kBF16},
      {.name = "packed, with empty sequences and a tail of no sequence",
       .B = 1, .T = 200, .H = 2, .HV = 2, .offsets_step = 1, .offsets = {0, 0, 5, 69, 69, 190, 190}},
      {.name = "packed, one-token sequences, activated gate, bf16 state",
       .B = 1, .T = 40, .H = 1, .HV = 1, .gate = Gate::kActivated, .state_dtype = DType::kBF16,
       .offsets_step = 1, .gate_mean = -1},
      {.name = "segments with gaps, rows that differ, unused segments",
       .B = 2, .T = 150, .H = 2, .HV = 2, .offsets_step = 2,
       .offsets = {3, 70, 75, 150, 150, 150, 0, 0, 0, 64, 100, 149}},
      {.name = "malformed: past the end, decreasing, a first offset that is not 0, all packed",
       .B = 4, .T = 90, .H = 1, .HV = 2, .offsets_step = 1,
       .offsets = {0, 40, 2147483647, 0, 60, 30, 7, 50, 90, 0, 30, 90}, .malformed_rows = {0, 1, 2}},
      {.name = "malformed segments: negative, overlapping, ends before it begins, past the end",
       .B = 5, .T = 70, .H = 1, .HV = 1, .offsets_step = 2,
       .offsets = {-1, -1, -1, -1, 0, 40, 30, 70, 50, 20, 60, 70, 0, 10, 20, 71, 0, 10, 20, 70},
       .malformed_rows = {0, 1, 2, 3}},
  };
  // clang-format on
  for (Config& c : configs) {
    if (c.offsets_step == 1 && c.offsets.empty()) {
      for (int32_t t = 0; t <= c.T; ++t) c.offsets.push_back(t);
    }
  }
  return configs;
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
    const jax_kda::Config planted{.name = "planted overrun", .B = 1, .T = 130, .H = 1, .HV = 1};
    const std::string fault = jax_kda::Run(planted, /*poison=*/true, /*missing_rows_of_o=*/1);
    std::printf("planted: %s\n", fault.empty() ? "launched" : fault.c_str());
    return 0;
  }
  int failures = 0;
  for (const jax_kda::Config& config : jax_kda::Configs()) {
    const std::string fault = jax_kda::Run(config, mode != "--raw", /*missing_rows_of_o=*/0);
    std::printf("%-4s %s%s%s\n", fault.empty() ? "ok" : "FAIL", config.name,
                fault.empty() ? "" : ": ", fault.c_str());
    failures += !fault.empty();
  }
  return failures;
}
