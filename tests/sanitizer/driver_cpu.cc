// Calls the CPU kernels, every instruction set this machine has, on heap buffers of exactly the
// contract's sizes: to be built with a sanitizer of the compiler. run_cpu.sh does, and runs it.
// With --plant and an op, `o` is one row short: the address sanitizer has to report it.
//
// Malformed offsets have to come back as an error. The exit status counts what went wrong.
#include <cstdio>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "configs.h"
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

std::string Run(const Config& c, const Op& op, const cpu::Kernels& kernels,
                int64_t missing_rows_of_o) {
  const Operands x = MakeOperands(c);
  const Buffer q(x.q), k(x.k), v(x.v), g(x.g), beta(x.beta), A_log(x.A_log), dt_bias(x.dt_bias);
  const Buffer offsets(x.offsets), initial_state(x.initial_state);
  const Buffer state_indices(x.state_indices), output_state_indices(x.output_state_indices);
  const Buffer checkpoint_indices(x.checkpoint_indices);
  const std::byte poison{0xff};  // a NaN in bf16 and in f32
  const Buffer o(Bytes((c.values() - missing_rows_of_o * c.HV * c.V) * SizeOf(c.dtype), poison));
  const bool separate = c.has_final_state() && !c.in_place;
  const Buffer own_final_state(Bytes(separate ? c.states() * SizeOf(c.state_dtype) : 0, poison));
  const Buffer& final_state = c.in_place ? initial_state : own_final_state;

  FwdParams p = MakeParams(c);
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
  p.o = o.data.get();
  p.final_state = final_state.data.get();

  std::vector<std::thread> threads;
  const cpu::Executor executor{
      3, [&threads](std::function<void()> task) { threads.emplace_back(std::move(task)); }};
  const xla::ffi::Error error = op.run(p, kernels, executor);
  for (std::thread& thread : threads) thread.join();
  if (!c.malformed_rows.empty()) return error.failure() ? "" : "malformed offsets were accepted";
  return error.failure() ? error.message() : Judge(c, o.bytes(), final_state.bytes());
}

}  // namespace
}  // namespace jax_kda

int main(int argc, char** argv) {
  if (argc > 2 && std::string(argv[1]) == "--plant") {
    for (const jax_kda::Op& op : jax_kda::kOps) {
      if (std::string(argv[2]) != op.name) continue;
      jax_kda::Run(jax_kda::kPlanted, op, *jax_kda::cpu::SupportedKernels().front(),
                   /*missing_rows_of_o=*/1);
    }
    return 0;
  }
  std::vector<jax_kda::Config> configs = jax_kda::kConfigs;
  for (const auto* more : {&jax_kda::kPoolConfigs, &jax_kda::kCpuConfigs}) {
    configs.insert(configs.end(), more->begin(), more->end());
  }
  int failures = 0;
  for (const jax_kda::cpu::Kernels* kernels : jax_kda::cpu::SupportedKernels()) {
    for (const jax_kda::Op& op : jax_kda::kOps) {
      for (const jax_kda::Config& config : configs) {
        const std::string fault = jax_kda::Run(config, op, *kernels, /*missing_rows_of_o=*/0);
        std::printf("%-4s %s, %s: %s%s%s\n", fault.empty() ? "ok" : "FAIL", op.name, kernels->name,
                    config.name, fault.empty() ? "" : ": ", fault.c_str());
        failures += !fault.empty();
      }
    }
  }
  return failures;
}
