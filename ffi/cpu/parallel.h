// A parallel loop on somebody else's thread pool: XLA's, in the handler.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>

namespace jax_kda::cpu {

struct Executor {
  int64_t threads;  // that may work at once, the caller among them
  std::function<void(std::function<void()>)> schedule;

  int64_t workers(int64_t items) const {
    return std::max<int64_t>(1, std::min(items, std::max<int64_t>(threads, 1)));
  }
};

// Calls body(item, worker) for every item in [0, items), worker in [0, executor.workers(items)); a
// worker runs one item at a time. `body` must not throw.
//
// The caller works too and waits only for items that somebody has begun, so the loop ends even when
// the pool never starts a task: handlers run on pool threads themselves. A task that starts late
// finds nothing to claim and must touch only the shared state, which is why that state is not on
// the caller's stack.
inline void ParallelFor(const Executor& executor, int64_t items,
                        const std::function<void(int64_t item, int64_t worker)>& body) {
  struct State {
    std::atomic<int64_t> next{0};
    std::atomic<int64_t> done{0};
    std::mutex mutex;
    std::condition_variable all_done;
  };
  if (items <= 0) return;
  const auto state = std::make_shared<State>();
  const auto* loop = &body;  // alive while an item can still be claimed
  const auto work = [state, loop, items](int64_t worker) {
    for (int64_t item; (item = state->next.fetch_add(1)) < items;) {
      (*loop)(item, worker);
      if (state->done.fetch_add(1) + 1 == items) {
        std::lock_guard<std::mutex> lock(state->mutex);
        state->all_done.notify_one();
      }
    }
  };
  const int64_t workers = executor.workers(items);
  for (int64_t worker = 1; worker < workers; ++worker) {
    executor.schedule([work, worker] { work(worker); });
  }
  work(0);
  std::unique_lock<std::mutex> lock(state->mutex);
  state->all_done.wait(lock, [&] { return state->done.load() == items; });
}

}  // namespace jax_kda::cpu
