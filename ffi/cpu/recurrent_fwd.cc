// The recurrence on the CPU: who moves which rows of which state.
//
// One task is a strip of the V rows of one sequence and head: all of them where there are enough
// tasks. Float32 states with whole vectors of K are read and written where they lie; others pass
// through a buffer, as do all between blocks of tokens.
#include "ffi/cpu/recurrent_fwd.h"

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

constexpr int64_t kTasksPerThread = 4;
constexpr int64_t kMinStrip = 16;  // rows; a strip activates its tokens again
constexpr int64_t kPiece = 32;     // rows whose buffer stays in the first-level cache

// Rows of a strip: a multiple of the kernel's tile, so that no result depends on it.
int64_t StripRows(const FwdParams& p, const RecurrentKernel& kernel, int64_t chains,
                  int64_t threads) {
  if (chains == 0 || threads == 1) return p.V;
  const int64_t strips = (kTasksPerThread * threads + chains - 1) / chains;
  const int64_t rows = std::max(kMinStrip, (p.V + strips - 1) / strips);
  return std::min(p.V, (rows + kernel.tile - 1) / kernel.tile * kernel.tile);
}

class Recurrence {
 public:
  Recurrence(const FwdParams& p, const RecurrentKernel& kernel)
      : p_(p),
        kernel_(kernel),
        direct_(p.state_dtype == DType::kF32 && kernel.row_size(p) == p.K) {}

  void Run(const Executor& executor) const {
    CopyPool(p_, executor);
    ZeroGaps(p_);
    const std::vector<Chain> chains = MakeChains(p_);
    const int64_t n_chains = static_cast<int64_t>(chains.size());
    const int64_t rows = StripRows(p_, kernel_, n_chains, executor.workers(INT64_MAX));
    const int64_t strips = (p_.V + rows - 1) / rows;
    const int64_t workers = executor.workers(n_chains * strips);
    const Buffers states(workers, rows * kernel_.row_size(p_));
    const Buffers scratch(workers, kernel_.scratch_size(p_));
    ParallelFor(executor, n_chains * strips, [&](int64_t item, int64_t worker) {
      const FlushDenormals flush;
      const int64_t row = item % strips * rows;
      MoveRows(chains[item / strips], {row, std::min(rows, p_.V - row)}, states[worker],
               scratch[worker]);
    });
  }

 private:
  void MoveRows(const Chain& chain, const StateRows& y, float* S, float* scratch) const {
    const int64_t count = chain.end - chain.begin;
    if (count == 0) {
      if (y.row == 0) CopyState(p_, chain.read, chain.write);
      return;
    }
    // Pieces share one block of tokens, but could not share the blocks of a long sequence.
    const bool one_block = count <= kernel_.tokens;
    if (one_block) kernel_.prepare(p_, {chain.b, chain.hv, chain.begin, count}, scratch);
    const int64_t piece = one_block && !direct_ ? kPiece : y.rows;
    for (int64_t i = 0; i < y.rows; i += piece) {
      MovePiece(chain, {y.row + i, std::min(piece, y.rows - i)}, S, scratch);
    }
  }

  void MovePiece(const Chain& chain, const StateRows& y, float* S, float* scratch) const {
    const int64_t count = chain.end - chain.begin;
    const float* from = S;
    if (direct_ && chain.read != kNoSlot) {
      from = reinterpret_cast<const float*>(InitialState(p_, chain.read)) + y.row * p_.K;
    } else {
      kernel_.load(p_, y, chain.read == kNoSlot ? nullptr : InitialState(p_, chain.read), S);
    }
    float* last = S;
    if (direct_ && chain.write != kNoSlot) {
      last = reinterpret_cast<float*>(FinalState(p_, chain.write)) + y.row * p_.K;
    }
    for (int64_t done = 0; done < count;) {
      const int64_t tokens = std::min(kernel_.tokens, count - done);
      const HeadTokens x{chain.b, chain.hv, chain.begin + done, tokens};
      float* to = done + tokens == count ? last : S;
      if (tokens < count) kernel_.prepare(p_, x, scratch);
      kernel_.move(p_, x, y, from, to, scratch);
      from = to;
      done += tokens;
      if (p_.checkpoint_indices != nullptr && done % kChunk == 0) {
        const int64_t slot = FindCheckpointSlot(p_, chain.n, done / kChunk - 1);
        Store(y, to, HeadState(p_, slot, chain.hv));
      }
    }
    if (last == S) Store(y, S, chain.write);
  }

  void Store(const StateRows& y, const float* S, int64_t state) const {
    if (state != kNoSlot) kernel_.store(p_, y, S, FinalState(p_, state));
  }

  const FwdParams& p_;
  const RecurrentKernel& kernel_;
  const bool direct_;
};

}  // namespace

ffi::Error RecurrentFwd(const FwdParams& p, const RecurrentKernel& kernel,
                        const Executor& executor) {
  RETURN_IF_ERROR(CheckOffsets(p));
  try {
    Recurrence(p, kernel).Run(executor);
  } catch (const std::bad_alloc&) {
    return ffi::Error(ffi::ErrorCode::kResourceExhausted,
                      "kda_recurrent_fwd: no memory for scratch");
  }
  return ffi::Error::Success();
}

}  // namespace jax_kda::cpu
