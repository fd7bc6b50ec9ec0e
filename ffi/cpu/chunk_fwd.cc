// The chunked forward on the CPU: who computes which chunk when.
//
// A chain (one sequence, one value head) is sequential in its chunks. With enough chains, each is
// one task: prepare a chunk, scan it while it is in the cache, go on. A chain that is long beside a
// thread's fair share is split instead: in windows of a few chunks, first all chunks are prepared
// in parallel, then the V strips of the state scan them in parallel. Both orders compute every
// number in the same way, so results do not depend on the number of threads.
#include "ffi/cpu/chunk_fwd.h"

#include <algorithm>
#include <new>
#include <vector>

#include "ffi/common/check.h"
#include "ffi/cpu/buffers.h"
#include "ffi/cpu/denormals.h"
#include "ffi/cpu/sequences.h"
#include "ffi/cpu/states.h"

namespace jax_kda::cpu {
namespace {

constexpr int64_t kMaxGroup =
    4;  // their states, 64 KiB each at K = V = 128, stay in the second-level cache

class Forward {
 public:
  Forward(const FwdParams& p, const ChunkKernel& kernel, const Executor& executor)
      : p_(p),
        kernel_(kernel),
        executor_(executor),
        threads_(std::max<int64_t>(executor.threads, 1)),
        strips_((p.V + kernel.strip - 1) / kernel.strip),
        strip_size_(kernel.state_rows(p) * kernel.strip) {}

  void Run() {
    CopyPool(p_, executor_);
    ZeroGaps(p_);
    std::vector<Chain> chains = MakeChains(p_);
    int64_t chunks = 0;
    for (const Chain& chain : chains) chunks += chain.chunks();
    const auto whole = std::find_if(chains.begin(), chains.end(), [&](const Chain& chain) {
      return threads_ == 1 || 2 * threads_ * chain.chunks() <= chunks;
    });
    RunSplit({chains.begin(), whole});
    RunWhole({whole, chains.end()});
  }

 private:
  HeadTokens Tokens(const Chain& chain, int64_t chunk) const {
    const int64_t token = chain.begin + chunk * kChunk;
    return {chain.b, chain.hv, token, std::min<int64_t>(kChunk, chain.end - token)};
  }

  // A task is a group of chains, mostly heads of one sequence, that go from chunk to chunk
  // together. The heads of a token share pages of memory: one chain alone would miss the TLB at
  // every row it touches.
  void RunWhole(const std::vector<Chain>& chains) const {
    const int64_t n_chains = static_cast<int64_t>(chains.size());
    if (n_chains == 0) return;
    const int64_t group = std::clamp<int64_t>(n_chains / (2 * threads_), 1, kMaxGroup);
    const int64_t groups = (n_chains + group - 1) / group;
    const int64_t workers = executor_.workers(groups);
    const Buffers prepared(workers, kernel_.prepared_size(p_));
    Buffers prepare_scratch(workers, kernel_.prepare_scratch_size(p_));
    prepare_scratch.Zero();  // read in whole vectors, past what is written
    const Buffers scan_scratch(workers, kernel_.scan_scratch_size(p_));
    const Buffers states(workers * group * strips_, strip_size_);
    ParallelFor(executor_, groups, [&](int64_t item, int64_t worker) {
      const FlushDenormals flush;
      const int64_t first = item * group;
      const int64_t last = std::min(first + group, n_chains);
      for (int64_t n = 0; n < std::max<int64_t>(chains[first].chunks(), 1); ++n) {
        for (int64_t c = first; c < last; ++c) {
          const Chain& chain = chains[c];
          if (n == 0 && chain.chunks() == 0) CopyState(p_, chain.read, chain.write);
          if (n >= chain.chunks()) continue;
          const int64_t state = (worker * group + c - first) * strips_;
          const HeadTokens x = Tokens(chain, n);
          kernel_.prepare(p_, x, prepared[worker], prepare_scratch[worker]);
          for (int64_t s = 0; s < strips_; ++s) {
            float* S = states[state + s];
            if (n == 0) LoadState(chain, s, S);
            kernel_.scan(p_, x, prepared[worker], s * kernel_.strip, S, scan_scratch[worker]);
            StoreStates(chain, n, s, S);
          }
        }
      }
    });
  }

  void RunSplit(const std::vector<Chain>& chains) const {
    const int64_t n_chains = static_cast<int64_t>(chains.size());  // fewer than twice the threads
    if (n_chains == 0) return;
    const int64_t longest = chains.front().chunks();
    const int64_t window = std::min(longest, std::max<int64_t>(1, 8 * threads_ / n_chains));
    const int64_t prepare_workers = executor_.workers(n_chains * window);
    const int64_t scan_workers = executor_.workers(n_chains * strips_);
    const Buffers prepared(n_chains * window, kernel_.prepared_size(p_));
    Buffers prepare_scratch(prepare_workers, kernel_.prepare_scratch_size(p_));
    prepare_scratch.Zero();  // read in whole vectors, past what is written
    const Buffers scan_scratch(scan_workers, kernel_.scan_scratch_size(p_));
    const Buffers states(n_chains * strips_, strip_size_);

    for (int64_t first = 0; first < longest; first += window) {
      ParallelFor(executor_, n_chains * window, [&](int64_t item, int64_t worker) {
        const FlushDenormals flush;
        const Chain& chain = chains[item / window];
        const int64_t n = first + item % window;
        if (n >= chain.chunks()) return;
        kernel_.prepare(p_, Tokens(chain, n), prepared[item], prepare_scratch[worker]);
      });
      ParallelFor(executor_, n_chains * strips_, [&](int64_t item, int64_t worker) {
        const FlushDenormals flush;
        const int64_t c = item / strips_;
        const int64_t s = item % strips_;
        const Chain& chain = chains[c];
        const int64_t last = std::min(first + window, chain.chunks());
        if (first >= last) return;
        if (first == 0) LoadState(chain, s, states[item]);
        for (int64_t n = first; n < last; ++n) {
          kernel_.scan(p_, Tokens(chain, n), prepared[c * window + n - first], s * kernel_.strip,
                       states[item], scan_scratch[worker]);
          StoreStates(chain, n, s, states[item]);
        }
      });
    }
  }

  void LoadState(const Chain& chain, int64_t s, float* S) const {
    const void* from = chain.read == kNoSlot ? nullptr : InitialState(p_, chain.read);
    LoadStrip(p_, p_.state_dtype, from, s, kernel_.state_rows(p_), kernel_.strip, S);
  }

  // What is kept of strip `s` after chunk n.
  void StoreStates(const Chain& chain, int64_t n, int64_t s, const float* S) const {
    if (p_.checkpoint_indices != nullptr && (n + 1) * kChunk <= chain.end - chain.begin) {
      StoreState(HeadState(p_, FindCheckpointSlot(p_, chain.n, n), chain.hv), s, S);
    }
    if (n + 1 == chain.chunks()) StoreState(chain.write, s, S);
  }

  void StoreState(int64_t state, int64_t s, const float* S) const {
    if (state == kNoSlot) return;
    StoreStrip(p_, p_.state_dtype, S, s, kernel_.strip, FinalState(p_, state));
  }

  const FwdParams& p_;
  const ChunkKernel& kernel_;
  const Executor& executor_;
  const int64_t threads_;
  const int64_t strips_;
  const int64_t strip_size_;
};

}  // namespace

ffi::Error ChunkFwd(const FwdParams& p, const ChunkKernel& kernel, const Executor& executor) {
  RETURN_IF_ERROR(CheckOffsets(p));
  try {
    Forward(p, kernel, executor).Run();
  } catch (const std::bad_alloc&) {
    return ffi::Error(ffi::ErrorCode::kResourceExhausted, "kda_chunk_fwd: no memory for scratch");
  }
  return ffi::Error::Success();
}

}  // namespace jax_kda::cpu
