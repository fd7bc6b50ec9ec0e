// The gradient of the chunked forward on the CPU, from the inputs alone: who computes what when.
//
// A task is one sequence and one query/key head, with all value heads that share it, so that dq and
// dk are summed in one order. For each value head it goes forward through the chunks, keeping the
// state that enters each, and then backward. Of a long sequence it first keeps the states that
// enter its windows alone, and goes forward through each window again before it goes backward.
//
// Scratch of a worker, at K = V = 128: 96 KiB for each chunk of a window (12 MiB), 64 KiB for each
// window; with grouped value heads 1 KiB for each token of the longest sequence; 1 MiB besides.
#include "ffi/cpu/chunk_bwd.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <vector>

#include "ffi/common/check.h"
#include "ffi/cpu/buffers.h"
#include "ffi/cpu/denormals.h"
#include "ffi/cpu/sequences.h"
#include "ffi/cpu/states.h"

namespace jax_kda::cpu {
namespace {

constexpr int64_t kWindow = 128;  // chunks

class Backward {
 public:
  Backward(const BwdParams& b, const ChunkGradKernel& kernel, const Executor& executor)
      : b_(b),
        p_(b.fwd),
        kernel_(kernel),
        executor_(executor),
        group_(p_.HV / p_.H),
        strips_((p_.V + kernel.strip - 1) / kernel.strip),
        strip_size_(kernel.state_rows(p_) * kernel.strip),
        parameter_sums_(
            b.dA_log == nullptr && b.ddt_bias == nullptr ? 0 : p_.B * p_.M * p_.HV * (1 + p_.K)) {}

  void Run() {
    ZeroGaps();
    // Of a group, the chain of its first head stands for all.
    std::vector<Chain> chains = MakeChains(p_);
    chains.erase(std::remove_if(chains.begin(), chains.end(),
                                [&](const Chain& chain) { return chain.hv % group_ != 0; }),
                 chains.end());
    const int64_t tasks = static_cast<int64_t>(chains.size());
    const int64_t longest = chains.empty() ? 0 : chains.front().chunks();
    const int64_t windows = (longest + kWindow - 1) / kWindow;
    const int64_t workers = executor_.workers(tasks);
    const int64_t rows = kernel_.state_rows(p_);
    const Buffers kept(workers * std::min(longest, kWindow), kernel_.kept_size(p_));
    const Buffers borders(workers * windows, strips_ * strip_size_);
    const Buffers states(workers, 2 * strips_ * strip_size_);
    const Buffers sums(workers * (group_ > 1 ? longest : 1), 2 * kChunk * rows);
    Buffers scratch(workers, kernel_.scratch_size(p_));
    scratch.Zero();
    ParallelFor(executor_, tasks, [&](int64_t item, int64_t worker) {
      const FlushDenormals flush;
      const Worker w = {kept,           worker * std::min(longest, kWindow),
                        borders,        worker * windows,
                        states[worker], states[worker] + strips_ * strip_size_,
                        sums,           group_ > 1 ? worker * longest : worker,
                        scratch[worker]};
      Chain chain = chains[item];
      for (int64_t r = 0; r < group_; ++r) {
        RunHead(chain, r == 0, r + 1 == group_, w);
        ++chain.hv;
        if (chain.read != kNoSlot) ++chain.read;
      }
    });
    SumParameters();
  }

 private:
  // Scratch of one worker: arrays of a Buffers from an index on.
  struct Worker {
    const Buffers& kept;  // of the window's chunks
    int64_t first_kept;
    const Buffers& borders;  // S entering the windows
    int64_t first_border;
    float* S;
    float* dS;
    const Buffers& sums;  // dq, then dk, of the chunks; without groups of the current chunk alone
    int64_t first_sum;
    float* scratch;
  };

  HeadTokens Tokens(const Chain& chain, int64_t chunk) const {
    const int64_t token = chain.begin + chunk * kChunk;
    return {chain.b, chain.hv, token, std::min<int64_t>(kChunk, chain.end - token)};
  }

  void RunHead(const Chain& chain, bool first, bool last, const Worker& w) {
    const int64_t state = HeadState(p_, chain.n, chain.hv);
    const size_t state_bytes = strips_ * strip_size_ * sizeof(float);
    const int64_t chunks = chain.chunks();
    const int64_t windows = (chunks + kWindow - 1) / kWindow;
    const void* initial_state = chain.read == kNoSlot ? nullptr : InitialState(p_, chain.read);
    Load(p_.state_dtype, initial_state, w.S);
    Load(b_.dfinal_state_dtype, HeadOf(b_.dfinal_state, b_.dfinal_state_dtype, state), w.dS);
    for (int64_t n = 0; n + 1 < windows; ++n) {
      std::memcpy(w.borders[w.first_border + n], w.S, state_bytes);
      for (int64_t c = n * kWindow; c < (n + 1) * kWindow; ++c) {
        kernel_.forward(p_, Tokens(chain, c), w.S, nullptr, w.scratch);
      }
    }
    double* sums = parameter_sums_.empty() ? nullptr : &parameter_sums_[state * (1 + p_.K)];
    for (int64_t n = windows - 1; n >= 0; --n) {
      const int64_t begin = n * kWindow;
      const int64_t end = std::min(begin + kWindow, chunks);
      if (n + 1 < windows) std::memcpy(w.S, w.borders[w.first_border + n], state_bytes);
      for (int64_t c = begin; c < end; ++c) {
        kernel_.forward(p_, Tokens(chain, c), w.S, w.kept[w.first_kept + c - begin], w.scratch);
      }
      for (int64_t c = end - 1; c >= begin; --c) {
        float* dq = w.sums[w.first_sum + (group_ > 1 ? c : 0)];
        float* dk = dq + kChunk * kernel_.state_rows(p_);
        const ChunkGradients to = {dq, dk, first, last, sums, sums == nullptr ? nullptr : sums + 1};
        kernel_.backward(b_, Tokens(chain, c), w.kept[w.first_kept + c - begin], w.dS, to,
                         w.scratch);
      }
    }
    if (b_.dinitial_state == nullptr) return;
    void* to = static_cast<std::byte*>(b_.dinitial_state) + state * StateBytes(p_);
    for (int64_t s = 0; s < strips_; ++s) {
      StoreStrip(p_, p_.state_dtype, w.dS + s * strip_size_, s, kernel_.strip, to);
    }
  }

  const void* HeadOf(const void* states, DType dtype, int64_t state) const {
    if (states == nullptr) return nullptr;
    return static_cast<const std::byte*>(states) +
           state * p_.V * p_.K * (dtype == DType::kBF16 ? 2 : 4);
  }

  void Load(DType dtype, const void* from, float* S) const {
    for (int64_t s = 0; s < strips_; ++s) {
      LoadStrip(p_, dtype, from, s, kernel_.state_rows(p_), kernel_.strip, S + s * strip_size_);
    }
  }

  // Of the sequences of a row, in order.
  void SumParameters() const {
    if (parameter_sums_.empty()) {
      if (b_.dA_log != nullptr) std::fill_n(b_.dA_log, p_.B * p_.HV, 0.0f);
      if (b_.ddt_bias != nullptr) std::fill_n(b_.ddt_bias, p_.B * p_.HV * p_.K, 0.0f);
      return;
    }
    std::vector<double> sums(1 + p_.K);
    for (int64_t i = 0; i < p_.B * p_.HV; ++i) {
      std::fill(sums.begin(), sums.end(), 0.0);
      for (int64_t m = 0; m < p_.M; ++m) {
        const int64_t state = HeadState(p_, i / p_.HV * p_.M + m, i % p_.HV);
        const double* from = &parameter_sums_[state * (1 + p_.K)];
        for (int64_t k = 0; k <= p_.K; ++k) sums[k] += from[k];
      }
      if (b_.dA_log != nullptr) b_.dA_log[i] = static_cast<float>(sums[0]);
      if (b_.ddt_bias == nullptr) continue;
      for (int64_t k = 0; k < p_.K; ++k) {
        b_.ddt_bias[i * p_.K + k] = static_cast<float>(sums[1 + k]);
      }
    }
  }

  // Tokens of no sequence get gradients of 0.
  void ZeroGaps() const {
    for (int64_t b = 0; b < p_.B; ++b) {
      int64_t last = 0;
      for (int64_t m = 0; m < p_.M; ++m) {
        const Sequence s = SequenceAt(p_, b, m);
        ZeroTokens(b, last, s.begin);
        last = s.end;
      }
      ZeroTokens(b, last, p_.T);
    }
  }

  void ZeroTokens(int64_t b, int64_t begin, int64_t end) const {
    if (begin >= end) return;
    const auto zero = [&](void* rows, DType dtype, int64_t size) {
      const int64_t bytes = size * (dtype == DType::kBF16 ? 2 : 4);
      std::memset(static_cast<std::byte*>(rows) + (b * p_.T + begin) * bytes, 0,
                  (end - begin) * bytes);
    };
    zero(b_.dq, p_.dtype, p_.H * p_.K);
    zero(b_.dk, p_.dtype, p_.H * p_.K);
    zero(b_.dv, p_.dtype, p_.HV * p_.V);
    zero(b_.dg, p_.g_dtype, p_.HV * p_.K);
    zero(b_.dbeta, p_.beta_dtype, p_.HV);
  }

  const BwdParams& b_;
  const FwdParams& p_;
  const ChunkGradKernel& kernel_;
  const Executor& executor_;
  const int64_t group_;
  const int64_t strips_;
  const int64_t strip_size_;
  std::vector<double> parameter_sums_;  // [N, HV, 1 + K]  of dA_log, then of ddt_bias
};

}  // namespace

ffi::Error ChunkBwd(const BwdParams& b, const ChunkGradKernel& kernel, const Executor& executor) {
  RETURN_IF_ERROR(CheckOffsets(b.fwd));
  try {
    Backward(b, kernel, executor).Run();
  } catch (const std::bad_alloc&) {
    return ffi::Error(ffi::ErrorCode::kResourceExhausted, "kda_chunk_bwd: no memory for scratch");
  }
  return ffi::Error::Success();
}

}  // namespace jax_kda::cpu
