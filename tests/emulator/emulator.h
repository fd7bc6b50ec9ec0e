// CUDA on a CPU, as far as the Hopper kernels use it: enough to run them in tests without a GPU.
//
// A block's threads are fibers. One runs at a time, from one operation that waits for others to the
// next, and warps run in random order, far ahead of each other or behind. Copies of the copy engine
// out of shared memory read as late as they may. Shared memory starts as NaN. These end a run with
// a message: a deadlock; a misaligned or stray address; a barrier with the wrong count, an mbarrier
// with the wrong bytes; two accesses to shared memory, one of them a write, that no barrier orders
// (vector clocks, a warp's lanes ordered by __syncwarp alone); a block that may end before what
// another sends it has come.
//
// The blocks of a cluster, at most two along y, run together, clusters one after the other, kernels
// in the order of their launches. What is not here: time, races in global memory, proxies and their
// fences, the scope of an ordering (all are as if of the cluster), products that still run when
// their operands change.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

// ------------------------------------------------------------------------------------------------
// the language

#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))

struct float2 {
  float x, y;
};
struct float4 {
  float x, y, z, w;
};
struct uint2 {
  uint32_t x, y;
};
struct uint3 {
  uint32_t x, y, z;
};
struct uint4 {
  uint32_t x, y, z, w;
};
struct dim3 {
  uint32_t x, y, z;
  dim3(int64_t x = 1, int64_t y = 1, int64_t z = 1)
      : x(static_cast<uint32_t>(x)), y(static_cast<uint32_t>(y)), z(static_cast<uint32_t>(z)) {}
};
using std::max;
using std::min;

inline float __uint_as_float(uint32_t x) { return std::bit_cast<float>(x); }
inline uint32_t __float_as_uint(float x) { return std::bit_cast<uint32_t>(x); }

struct __nv_bfloat16 {
  uint16_t bits;
};
inline float __bfloat162float(__nv_bfloat16 x) { return __uint_as_float(uint32_t{x.bits} << 16); }
inline __nv_bfloat16 __float2bfloat16(float x) {
  const uint32_t u = __float_as_uint(x);
  return {std::isnan(x) ? uint16_t{0x7fff}
                        : static_cast<uint16_t>((u + 0x7fff + (u >> 16 & 1)) >> 16)};
}
struct __half2 {
  uint16_t x, y;
};
inline float2 __half22float2(__half2 x) {
  return {static_cast<float>(std::bit_cast<_Float16>(x.x)),
          static_cast<float>(std::bit_cast<_Float16>(x.y))};
}

// -------------------------------------------------------------------------------------------------
// clusters of blocks

namespace emulator {

inline constexpr int kWarp = 32, kStackBytes = 128 * 1024, kSharedBytes = 232448;
// Each block of a cluster has its window of shared addresses: what a matrix descriptor can hold.
inline constexpr uint32_t kMaxBlocks = 2, kWindow = 1 << 18;
alignas(1024) inline uint8_t memory[kMaxBlocks * kWindow];

// How much of each warp's past is known to have happened.
using Clock = std::vector<uint32_t>;
inline void Join(Clock& a, const Clock& b) {
  for (size_t w = 0; w < b.size(); ++w) a[w] = std::max(a[w], b[w]);
}

struct Warp {
  int arrived = 0;
  uint64_t generation = 0;
  alignas(16) uint8_t slots[2][kWarp][64];
  Clock clock;
};
struct Barrier {
  int arrived = 0;
  uint64_t generation = 0;
  Clock gathered, released;
};
struct Mbarrier {
  int arrivals = 0, expected = 0;
  int64_t bytes = 0;
  uint32_t phase = 0;
  Clock gathered, released;
};
struct Fiber {
  ucontext_t context;
  uint32_t rank;      // of its block
  int tid;            // in its block
  int warp;           // in the cluster
  uint32_t step = 1;  // grows with all that lets the lanes of a warp see each other's writes
  bool done = false;
  std::vector<std::function<void()>> copies;  // bulk stores that have not read yet
};
// Of every byte of shared memory the last write, and of every warp of its block the last read.
struct Shadow {
  struct Access {
    uint32_t time = 0, step = 0;  // 0: none
    uint8_t warp = 0, lane = 0;   // kWarp: several lanes; beyond: the copy engine
  };
  std::vector<Access> writes, reads;
};
struct Block {
  uint3 index;
  int running;  // threads that have not ended
  Barrier barriers[16];
};
struct Cluster {
  std::vector<Block> blocks;  // by rank
  int threads;                // of a block
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  Barrier barrier;
  std::map<uint32_t, Mbarrier> mbarriers;
  std::function<void()> body;
  uint3 grid;
  ucontext_t scheduler;
  Fiber* current = nullptr;
  uint64_t progress = 0;  // grows with everything that somebody may wait for
  Shadow shadow;
};
inline Cluster* cluster = nullptr;
inline std::mt19937 random;
inline std::string failure;  // of the run, empty if there is none

inline void Yield() { swapcontext(&cluster->current->context, &cluster->scheduler); }
inline void Fail(const std::string& what) {
  if (failure.empty()) failure = what;
  if (cluster != nullptr && cluster->current != nullptr) Yield();  // for good
}
template <typename Condition>
void WaitFor(Condition condition) {
  while (!condition()) Yield();
  ++cluster->progress;
}
inline int Tid() { return cluster->current->tid; }
inline int Lane() { return Tid() % kWarp; }
inline uint32_t Rank() { return cluster->current->rank; }
inline Block& ThisBlock() { return cluster->blocks[Rank()]; }
inline Warp& ThisWarp() { return cluster->warps[cluster->current->warp]; }
inline uint8_t* SharedMemory() { return memory + Rank() * kWindow; }
// Variables in shared memory are static, one for all blocks.
inline void ExpectOneBlock() {
  if (cluster->blocks.size() > 1) Fail("a variable in the shared memory of a cluster");
}

// All that other blocks send to this one has to be waited for by somebody: once a block has ended,
// its shared memory is another's.
inline void EndBlock() {
  Clock seen(cluster->warps.size());
  for (const Fiber& fiber : cluster->fibers) {
    if (fiber.rank == Rank()) Join(seen, cluster->warps[fiber.warp].clock);
  }
  for (const auto& [address, mbarrier] : cluster->mbarriers) {
    if (address / kWindow != Rank()) continue;
    for (size_t w = 0; w < seen.size(); ++w) {
      if (mbarrier.gathered[w] > seen[w]) Fail("a block may end before what another sends it");
    }
  }
}
inline void RunThread() {
  cluster->body();
  if (!cluster->current->copies.empty()) Fail("a thread ends before its bulk stores have read");
  if (--ThisBlock().running == 0) EndBlock();
  cluster->current->done = true;
  ++cluster->progress;
  Yield();
}
// `index`: of the block of rank 0.
inline void RunCluster(uint32_t blocks, int threads, uint3 index, uint3 grid,
                       const std::function<void()>& body) {
  static std::vector<std::unique_ptr<char[]>> stacks;
  Cluster c;
  cluster = &c;
  c.threads = threads;
  c.grid = grid;
  c.body = body;
  const int block_warps = threads / kWarp;
  const size_t warps = blocks * block_warps;
  c.barrier.gathered = c.barrier.released = Clock(warps);
  for (uint32_t rank = 0; rank < blocks; ++rank) {
    Block& block = c.blocks.emplace_back(Block{{index.x, index.y + rank, index.z}, threads});
    for (Barrier& barrier : block.barriers) barrier = c.barrier;
  }
  c.warps.resize(warps);
  for (size_t w = 0; w < warps; ++w) {
    c.warps[w].clock.assign(warps, 0);
    c.warps[w].clock[w] = 1;
  }
  c.shadow.writes.resize(blocks * kWindow);
  c.shadow.reads.resize(size_t{blocks} * kWindow * block_warps);
  c.fibers.resize(blocks * threads);
  while (stacks.size() < c.fibers.size()) {
    stacks.push_back(std::make_unique<char[]>(kStackBytes));
  }
  for (size_t i = 0; i < c.fibers.size(); ++i) {
    Fiber& fiber = c.fibers[i];
    fiber.rank = static_cast<uint32_t>(i / threads);
    fiber.tid = static_cast<int>(i % threads);
    fiber.warp = static_cast<int>(i / kWarp);
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = stacks[i].get();
    fiber.context.uc_stack.ss_size = kStackBytes;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, RunThread, 0);
  }
  std::memset(memory, 0xff, sizeof(memory));
  std::vector<int> order;
  for (size_t w = 0; w < warps; ++w) order.push_back(static_cast<int>(w));
  for (bool alive = true; alive && failure.empty();) {
    const uint64_t before = c.progress;
    alive = false;
    std::shuffle(order.begin(), order.end(), random);
    for (int w : order) {
      for (uint32_t steps = 1 + random() % 64; steps > 0; --steps) {
        const uint64_t at = c.progress;
        for (int lane = 0; lane < kWarp && failure.empty(); ++lane) {
          Fiber& fiber = c.fibers[w * kWarp + lane];
          if (fiber.done) continue;
          alive = true;
          c.current = &fiber;
          swapcontext(&c.scheduler, &fiber.context);
        }
        if (c.progress == at) break;
      }
    }
    c.current = nullptr;
    if (alive && c.progress == before) Fail("deadlock");
  }
  for (const Block& block : c.blocks) {
    for (const Barrier& barrier : block.barriers) {
      if (barrier.arrived != 0) Fail("a barrier is left with arrivals");
    }
  }
  cluster = nullptr;
}

// Every lane's value, once all lanes of the warp have come.
template <typename T>
std::array<T, kWarp> Exchange(const T& value) {
  static_assert(sizeof(T) <= sizeof(Warp::slots[0][0]));
  Warp& warp = ThisWarp();
  const uint64_t generation = warp.generation;
  std::memcpy(warp.slots[generation & 1][Lane()], &value, sizeof(T));
  if (++warp.arrived == kWarp) {
    warp.arrived = 0;
    ++warp.generation;
  }
  WaitFor([&] { return warp.generation != generation; });
  std::array<T, kWarp> all;
  for (int lane = 0; lane < kWarp; ++lane) {
    std::memcpy(&all[lane], warp.slots[generation & 1][lane], sizeof(T));
  }
  return all;
}

inline void Release(Clock& to) {
  Warp& warp = ThisWarp();
  Join(to, warp.clock);
  ++warp.clock[cluster->current->warp];
}
inline void Acquire(const Clock& from) { Join(ThisWarp().clock, from); }

inline void Sync(Barrier& barrier, int threads) {
  const uint64_t generation = barrier.generation;
  Release(barrier.gathered);
  ++cluster->progress;
  if (++barrier.arrived == threads) {
    barrier.arrived = 0;
    ++barrier.generation;
    Join(barrier.released, barrier.gathered);
  }
  if (barrier.arrived > threads) Fail("more arrivals than a barrier has threads");
  WaitFor([&] { return barrier.generation != generation; });
  Acquire(barrier.released);
  ++cluster->current->step;
}

// An address in this block's shared memory.
inline void Check(uint32_t address, size_t bytes) {
  if (address % bytes != 0) Fail("misaligned address in shared memory");
  if (address / kWindow != Rank() || address % kWindow + bytes > kSharedBytes) {
    Fail("address beyond shared memory");
  }
}
// Notes an access of this thread, or of the copy engine for it, after a look at whether those
// before it are ordered. Within a warp mbarriers order the copy engine, which alone writes to other
// blocks; nobody reads there.
inline void Note(uint32_t address, size_t bytes, bool write, bool copied = false) {
  const int warp = cluster->current->warp, lane = Lane(), block_warps = cluster->threads / kWarp;
  const Clock& clock = ThisWarp().clock;
  const uint32_t step = cluster->current->step;
  int racing = -1;  // a warp
  auto look = [&](const Shadow::Access& other) {
    if (other.time == 0) return;
    if (other.warp != warp ? other.time > clock[other.warp]
                           : other.lane != lane && other.lane <= kWarp && other.step == step) {
      racing = other.warp;
    }
  };
  const Shadow::Access access = {clock[warp], step, static_cast<uint8_t>(warp),
                                 static_cast<uint8_t>(copied ? kWarp + 1 : lane)};
  for (size_t i = address; i < address + bytes; ++i) {
    Shadow::Access* reads = &cluster->shadow.reads[i * block_warps];
    look(cluster->shadow.writes[i]);
    if (write) {
      for (int w = 0; w < block_warps; ++w) look(reads[w]);
      cluster->shadow.writes[i] = access;
    } else {
      Shadow::Access& read = reads[Tid() / kWarp];
      const bool again = read.step == step && read.lane != lane;
      read = access;
      if (again && !copied) read.lane = kWarp;
    }
    if (racing >= 0) {
      auto of_rank = [](size_t rank) { return " of rank " + std::to_string(rank); };
      Fail("thread " + std::to_string(Tid()) + of_rank(Rank()) + (write ? " writes" : " reads") +
           " byte " + std::to_string(i % kWindow) + of_rank(i / kWindow) +
           "'s shared memory that warp " + std::to_string(racing % block_warps) +
           of_rank(racing / block_warps) + " may not have done with");
    }
  }
}
template <typename T>
T Load(uint32_t address) {
  Check(address, sizeof(T));
  Note(address, sizeof(T), false);
  T value;
  std::memcpy(&value, memory + address, sizeof(T));
  return value;
}
template <typename T>
void Store(uint32_t address, const T& value) {
  Check(address, sizeof(T));
  Note(address, sizeof(T), true);
  std::memcpy(memory + address, &value, sizeof(T));
}

}  // namespace emulator

// threadIdx, blockIdx, gridDim: coordinates that are looked up when they are read.
template <uint32_t (*kRead)()>
struct Coordinate {
  operator uint32_t() const { return kRead(); }
};
inline const struct {
  Coordinate<[] { return static_cast<uint32_t>(emulator::Tid()); }> x;
} threadIdx;
inline const struct {
  Coordinate<[] { return emulator::ThisBlock().index.x; }> x;
  Coordinate<[] { return emulator::ThisBlock().index.y; }> y;
  Coordinate<[] { return emulator::ThisBlock().index.z; }> z;
} blockIdx;
inline const struct {
  Coordinate<[] { return emulator::cluster->grid.x; }> x;
  Coordinate<[] { return emulator::cluster->grid.y; }> y;
  Coordinate<[] { return emulator::cluster->grid.z; }> z;
} gridDim;

inline void __syncthreads() {
  emulator::Sync(emulator::ThisBlock().barriers[0], emulator::cluster->threads);
}
inline void __syncwarp() {
  emulator::Exchange(0);
  ++emulator::cluster->current->step;
}
template <typename T>
T __shfl_sync(uint32_t, T x, int lane) {
  return emulator::Exchange(x)[lane % emulator::kWarp];
}
template <typename T>
T __shfl_xor_sync(uint32_t, T x, int mask) {
  return emulator::Exchange(x)[(emulator::Lane() ^ mask) % emulator::kWarp];
}
inline uint32_t __ballot_sync(uint32_t, bool x) {
  const auto all = emulator::Exchange<uint32_t>(x);
  uint32_t bits = 0;
  for (int lane = 0; lane < emulator::kWarp; ++lane) bits |= all[lane] << lane;
  return bits;
}
inline bool __any_sync(uint32_t mask, bool x) { return __ballot_sync(mask, x) != 0; }
inline uint32_t __reduce_max_sync(uint32_t, uint32_t x) {
  const auto all = emulator::Exchange(x);
  return *std::max_element(all.begin(), all.end());
}
inline int atomicOr(int* address, int bits) { return std::exchange(*address, *address | bits); }

namespace cub {
template <typename T, int kThreads>
class BlockScan {
 public:
  struct TempStorage {
    T values[kThreads];
  };
  explicit BlockScan(TempStorage& storage) : storage_(storage) {}
  void ExclusiveSum(T value, T& before, T& total) {
    storage_.values[emulator::Tid()] = value;
    __syncthreads();
    before = total = 0;
    for (int t = 0; t < kThreads; ++t) {
      if (t == emulator::Tid()) before = total;
      total += storage_.values[t];
    }
  }

 private:
  TempStorage& storage_;
};
}  // namespace cub

// -------------------------------------------------------------------------------------------------
// the runtime

using cudaStream_t = void*;
enum cudaError_t { cudaSuccess };
inline const char* cudaGetErrorName(cudaError_t) { return ""; }
inline const char* cudaGetErrorString(cudaError_t) { return ""; }

enum { cudaMemcpyDeviceToDevice };
inline cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, int, cudaStream_t) {
  std::memcpy(to, from, bytes);
  return cudaSuccess;
}

enum { cudaFuncAttributeMaxDynamicSharedMemorySize };
template <typename Kernel>
cudaError_t cudaFuncSetAttribute(Kernel, int, int bytes) {
  if (bytes > emulator::kSharedBytes) emulator::Fail("more shared memory than a block may have");
  return cudaSuccess;
}
enum {
  cudaLaunchAttributeProgrammaticStreamSerialization,
  cudaLaunchAttributeClusterDimension,
};
struct cudaLaunchAttribute {
  int id;
  union {
    int programmaticStreamSerializationAllowed;
    uint3 clusterDim;
  } val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  int dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  int numAttrs;
};
template <typename... Params, typename... Args>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Params...),
                               const Args&... args) {
  const dim3 grid = config->gridDim;
  uint3 blocks = {1, 1, 1};  // of a cluster
  for (int i = 0; i < config->numAttrs; ++i) {
    const cudaLaunchAttribute& attribute = config->attrs[i];
    if (attribute.id == cudaLaunchAttributeClusterDimension) blocks = attribute.val.clusterDim;
  }
  if (blocks.x != 1 || blocks.y < 1 || blocks.y > emulator::kMaxBlocks || blocks.z != 1) {
    emulator::Fail("clusters of other blocks than one or two along y");
  } else if (grid.y % blocks.y != 0) {
    emulator::Fail("a grid that is not of whole clusters");
  }
  for (uint32_t z = 0; z < grid.z; ++z) {
    for (uint32_t y = 0; y < grid.y; y += blocks.y) {
      for (uint32_t x = 0; x < grid.x && emulator::failure.empty(); ++x) {
        emulator::RunCluster(blocks.y, static_cast<int>(config->blockDim.x), {x, y, z},
                             {grid.x, grid.y, grid.z}, [&] { kernel(args...); });
      }
    }
  }
  return cudaSuccess;
}

// A tensor map as launch_sm90.cuh makes them: [2 halves][tokens][heads][64], the innermost axis
// last.
using cuuint32_t = uint32_t;
using cuuint64_t = uint64_t;
enum CUresult { CUDA_SUCCESS };
enum CUtensorMapDataType { CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 };
enum CUtensorMapInterleave { CU_TENSOR_MAP_INTERLEAVE_NONE };
enum CUtensorMapSwizzle { CU_TENSOR_MAP_SWIZZLE_128B };
enum CUtensorMapL2promotion { CU_TENSOR_MAP_L2_PROMOTION_L2_256B };
enum CUtensorMapFloatOOBfill { CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE };
struct CUtensorMap {
  uint8_t* data;
  uint64_t sizes[4], strides[3];
  uint32_t box[4];
};
inline CUresult EncodeTiled(CUtensorMap* map, CUtensorMapDataType, cuuint32_t, void* data,
                            const cuuint64_t* sizes, const cuuint64_t* strides,
                            const cuuint32_t* box, const cuuint32_t*, CUtensorMapInterleave,
                            CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  map->data = static_cast<uint8_t*>(data);
  std::copy_n(sizes, 4, map->sizes);
  std::copy_n(strides, 3, map->strides);
  std::copy_n(box, 4, map->box);
  return CUDA_SUCCESS;
}
enum cudaDriverEntryPointQueryResult { cudaDriverEntryPointSuccess };
enum { cudaEnableDefault };
inline cudaError_t cudaGetDriverEntryPointByVersion(const char*, void** function, unsigned, int,
                                                    cudaDriverEntryPointQueryResult* found) {
  *function = reinterpret_cast<void*>(&EncodeTiled);
  *found = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
