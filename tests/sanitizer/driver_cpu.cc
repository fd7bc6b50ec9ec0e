// Calls the CPU kernels, every instruction set this machine has, on heap buffers of exactly the
// contract's sizes: to be built with a sanitizer of the compiler. run_cpu.sh does, and runs it.
// With --plant, `o` is one row short: the address sanitizer has to report it.
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

  size_t size;
  std::unique_ptr<std::byte[]> data;
};

std::string Run(const Config& c, const cpu::ChunkKernel& kernel, int64_t missing_rows_of_o) {
  const Operands x = MakeOperands(c);
  const Buffer q(x.q), k(x.k), v(x.v), g(x.g), beta(x.beta), A_log(x.A_log), dt_bias(x.dt_bias);
  const Buffer offsets(x.offsets), initial_state(x.initial_state);
  const std::byte poison{0xff};  // a NaN in bf16 and in f32
  const Buffer o(Bytes((c.values() - missing_rows_of_o * c.HV * c.V) * SizeOf(c.dtype), poison));
  const Buffer final_state(
      Bytes(c.state == State::kNone ? 0 : c.states() * SizeOf(c.state_dtype), poison));

  FwdParams p = MakeParams(c);
  p.q = q.data.get();
  p.k = k.data.get();
  p.v = v.data.get();
  p.g = g.data.get();
  p.beta = beta.data.get();
  p.A_log = reinterpret_cast<const float*>(A_log.data.get());
  p.dt_bias = reinterpret_cast<const float*>(dt_bias.data.get());
  p.offsets = reinterpret_cast<const int32_t*>(offsets.data.get());
  p.initial_state = initial_state.data.get();
  p.o = o.data.get();
  p.final_state = final_state.data.get();

  std::vector<std::thread> threads;
  const cpu::Executor executor{
      3, [&threads](std::function<void()> task) { threads.emplace_back(std::move(task)); }};
  const xla::ffi::Error error = cpu::ChunkFwd(p, kernel, executor);
  for (std::thread& thread : threads) thread.join();
  if (!c.malformed_rows.empty()) return error.failure() ? "" : "malformed offsets were accepted";
  return error.failure() ? error.message() : Judge(c, o.bytes(), final_state.bytes());
}

}  // namespace
}  // namespace jax_kda

int main(int argc, char** argv) {
  if (argc > 1 && std::string(argv[1]) == "--plant") {
    jax_kda::Run(jax_kda::kPlanted, *jax_kda::cpu::ChunkKernels().front(), /*missing_rows_of_o=*/1);
    return 0;
  }
  std::vector<jax_kda::Config> configs = jax_kda::kConfigs;
  configs.insert(configs.end(), jax_kda::kCpuConfigs.begin(), jax_kda::kCpuConfigs.end());
  int failures = 0;
  for (const jax_kda::cpu::ChunkKernel* kernel : jax_kda::cpu::ChunkKernels()) {
    for (const jax_kda::Config& config : configs) {
      const std::string fault = jax_kda::Run(config, *kernel, /*missing_rows_of_o=*/0);
      std::printf("%-4s %s: %s%s%s\n", fault.empty() ? "ok" : "FAIL", kernel->name, config.name,
                  fault.empty() ? "" : ": ", fault.c_str());
      failures += !fault.empty();
    }
  }
  return failures;
}
