// Calls the CPU kernels, every instruction set this machine has, on heap buffers of exactly the
// contract's sizes: to be built with a sanitizer of the compiler. run_cpu.sh does, and runs it.
// With --plant and an op, `o` (`dv` of the gradient) is one row short: the address sanitizer has to
// report it.
//
// Malformed offsets have to come back as an error. The exit status counts what went wrong.
#include <cmath>
#include <cstdio>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "configs.h"
#include "ffi/cpu/chunk_bwd.h"
#include "ffi/cpu/chunk_fwd.h"
#include "ffi/cpu/kernels.h"
#include "ffi/cpu/recurrent_fwd.h"

namespace jax_kda {
namespace {

// An allocation of exactly this size, which a vector does not promise; nullptr when it is empty.
struct Buffer {
  explicit Buffer(const Bytes& bytes) : size(bytes.size()) {
    if (size == 0) return;
    data.reset(new std::byte[size]);
    std::memcpy(data.get(), bytes.data(), size);
  }
  Bytes bytes() const { return Bytes(data.get(), data.get() + size); }

  template <class T>
  const T* as() const {
    return reinterpret_cast<const T*>(data.get());
  }

  size_t size;
  std::unique_ptr<std::byte[]> data;
};

struct Op {
  const char* name;
  xla::ffi::Error (*run)(const FwdParams& p, const cpu::Kernels& kernels,
                         const cpu::Executor& executor);
};

constexpr Op kOps[] = {
    {"chunk",
     [](const FwdParams& p, const cpu::Kernels& kernels, const cpu::Executor& executor) {
       return cpu::ChunkFwd(p, kernels.chunk, executor);
     }},
    {"recurrent",
     [](const FwdParams& p, const cpu::Kernels& kernels, const cpu::Executor& executor) {
       return cpu::RecurrentFwd(p, kernels.recurrent, executor);
     }},
};

const std::byte kPoison{0xff};  // a NaN in bf16 and in f32

// The operands of a configuration, and what points at them.
struct Inputs {
  explicit Inputs(const Config& c) : Inputs(c, MakeOperands(c)) {}

  Buffer q, k, v, g, beta, A_log, dt_bias, offsets, initial_state;
  Buffer state_indices, output_state_indices, checkpoint_indices;
  FwdParams p;

 private:
  Inputs(const Config& c, const Operands& x)
      : q(x.q),
        k(x.k),
        v(x.v),
        g(x.g),
        beta(x.beta),
        A_log(x.A_log),
        dt_bias(x.dt_bias),
        offsets(x.offsets),
        initial_state(x.initial_state),
        state_indices(x.state_indices),
        output_state_indices(x.output_state_indices),
        checkpoint_indices(x.checkpoint_indices),
        p(MakeParams(c)) {
    p.q = q.data.get();
    p.k = k.data.get();
    p.v = v.data.get();
    p.g = g.data.get();
    p.beta = beta.data.get();
    p.A_log = A_log.as<float>();
    p.dt_bias = dt_bias.as<float>();
    p.offsets = offsets.as<int32_t>();
    p.initial_state = initial_state.data.get();
    p.state_indices = state_indices.as<int32_t>();
    p.output_state_indices = output_state_indices.as<int32_t>();
    p.checkpoint_indices = checkpoint_indices.as<int32_t>();
  }
};

// Calls `run` with three threads. The message of its error, or "".
std::string RunThreads(const std::function<xla::ffi::Error(const cpu::Executor&)>& run) {
  std::vector<std::thread> threads;
  const cpu::Executor executor{
      3, [&threads](std::function<void()> task) { threads.emplace_back(std::move(task)); }};
  const xla::ffi::Error error = run(executor);
  for (std::thread& thread : threads) thread.join();
  return error.failure() ? error.message() : "";
}

std::string Run(const Config& c, const Op& op, const cpu::Kernels& kernels,
                int64_t missing_rows_of_o) {
  Inputs x(c);
  const Buffer o(Bytes((c.values() - missing_rows_of_o * c.HV * c.V) * SizeOf(c.dtype), kPoison));
  const bool separate = c.has_final_state() && !c.in_place;
  const Buffer own_final_state(Bytes(separate ? c.states() * SizeOf(c.state_dtype) : 0, kPoison));
  const Buffer& final_state = c.in_place ? x.initial_state : own_final_state;
  x.p.o = o.data.get();
  x.p.final_state = final_state.data.get();
  const std::string error =
      RunThreads([&](const cpu::Executor& executor) { return op.run(x.p, kernels, executor); });
  if (!c.malformed_rows.empty()) return error.empty() ? "malformed offsets were accepted" : "";
  return error.empty() ? Judge(c, o.bytes(), final_state.bytes()) : error;
}

// A gradient and what is wrong with it, or "": it has to be finite, and 0 for tokens of no sequence
// where it has `size` numbers a token; a size of 0: it is not by token.
struct Gradient {
  Gradient(const char* name, int64_t count, DType dtype, int64_t size)
      : name(name), dtype(dtype), size(size), buffer(Bytes(count * SizeOf(dtype), kPoison)) {}

  std::string Judge(const Config& c) const {
    const Bytes bytes = buffer.bytes();
    for (int64_t i = 0; i < static_cast<int64_t>(bytes.size() / SizeOf(dtype)); ++i) {
      const float x = At(bytes, dtype, i);
      const bool gap = size > 0 && !InSequence(c, i / size / c.T, i / size % c.T);
      if (gap ? x == 0.0f : std::isfinite(x)) continue;
      return std::string(name) + " has " + std::to_string(x) + " at " + std::to_string(i);
    }
    return "";
  }

  const char* name;
  DType dtype;
  int64_t size;
  Buffer buffer;
};

std::string RunGradient(const Config& c, const cpu::Kernels& kernels, int64_t missing_rows_of_dv) {
  const Inputs x(c);
  std::mt19937 generator(4321);
  const Buffer do_(Random(c.values(), c.dtype, &generator));
  const Buffer dfinal_state(c.has_final_state() ? Random(c.states(), c.state_dtype, &generator)
                                                : Bytes());
  const int64_t tokens = c.B * c.T, keys = c.H * c.K, values = c.HV * c.V, gates = c.HV * c.K;
  const bool biased = x.p.A_log != nullptr;
  const Gradient dq("dq", tokens * keys, c.dtype, keys), dk("dk", tokens * keys, c.dtype, keys);
  const Gradient dv("dv", (tokens - missing_rows_of_dv) * values, c.dtype, values);
  const Gradient dg("dg", tokens * gates, c.g_dtype, gates);
  const Gradient dbeta("dbeta", tokens * c.HV, c.beta_dtype, c.HV);
  const Gradient dA_log("dA_log", biased ? c.B * c.HV : 0, DType::kF32, 0);
  const Gradient ddt_bias("ddt_bias", biased ? c.B * gates : 0, DType::kF32, 0);
  const Gradient dinitial_state("dinitial_state", c.has_initial_state() ? c.states() : 0,
                                c.state_dtype, 0);

  BwdParams b{};
  b.fwd = x.p;
  b.do_ = do_.data.get();
  b.dfinal_state = dfinal_state.data.get();
  b.dfinal_state_dtype = c.state_dtype;
  b.dq = dq.buffer.data.get();
  b.dk = dk.buffer.data.get();
  b.dv = dv.buffer.data.get();
  b.dg = dg.buffer.data.get();
  b.dbeta = dbeta.buffer.data.get();
  b.dA_log = reinterpret_cast<float*>(dA_log.buffer.data.get());
  b.ddt_bias = reinterpret_cast<float*>(ddt_bias.buffer.data.get());
  b.dinitial_state = dinitial_state.buffer.data.get();
  std::string fault = RunThreads([&](const cpu::Executor& executor) {
    return cpu::ChunkBwd(b, kernels.chunk_grad, executor);
  });
  if (!c.malformed_rows.empty()) return fault.empty() ? "malformed offsets were accepted" : "";
  for (const Gradient* d : {&dq, &dk, &dv, &dg, &dbeta, &dA_log, &ddt_bias, &dinitial_state}) {
    if (fault.empty()) fault = d->Judge(c);
  }
  return fault;
}

}  // namespace
}  // namespace jax_kda

int main(int argc, char** argv) {
  using jax_kda::cpu::SupportedKernels;
  if (argc > 2 && std::string(argv[1]) == "--plant") {
    const jax_kda::cpu::Kernels& kernels = *SupportedKernels().front();
    for (const jax_kda::Op& op : jax_kda::kOps) {
      if (std::string(argv[2]) != op.name) continue;
      jax_kda::Run(jax_kda::kPlanted, op, kernels, /*missing_rows_of_o=*/1);
    }
    if (std::string(argv[2]) == "gradient") {
      jax_kda::RunGradient(jax_kda::kPlanted, kernels, /*missing_rows_of_dv=*/1);
    }
    return 0;
  }
  std::vector<jax_kda::Config> configs = jax_kda::kConfigs;
  for (const auto* more : {&jax_kda::kPoolConfigs, &jax_kda::kCpuConfigs}) {
    configs.insert(configs.end(), more->begin(), more->end());
  }
  int failures = 0;
  for (const jax_kda::cpu::Kernels* kernels : SupportedKernels()) {
    for (const jax_kda::Config& config : configs) {
      const auto report = [&](const char* op, const std::string& fault) {
        std::printf("%-4s %s, %s: %s%s%s\n", fault.empty() ? "ok" : "FAIL", op, kernels->name,
                    config.name, fault.empty() ? "" : ": ", fault.c_str());
        failures += !fault.empty();
      };
      for (const jax_kda::Op& op : jax_kda::kOps) {
        report(op.name, jax_kda::Run(config, op, *kernels, /*missing_rows_of_o=*/0));
      }
      if (config.pools > 0) continue;  // the reference's
      report("gradient", jax_kda::RunGradient(config, *kernels, /*missing_rows_of_dv=*/0));
    }
  }
  return failures;
}
