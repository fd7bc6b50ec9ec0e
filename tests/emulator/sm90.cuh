// What stands in for ffi/cuda/sm90.cuh where kernels are emulated: the same functions, by their
// definition. Arithmetic is that of the GPU but for the order of sums within one instruction and
// the last bits of exp2 and its kin.
#pragma once

#include "emulator.h"

namespace jax_kda::sm90 {

struct Fp16 {
  static float Read(uint32_t x) { return static_cast<float>(std::bit_cast<_Float16>(uint16_t(x))); }
  static uint16_t Round(float x) { return std::bit_cast<uint16_t>(static_cast<_Float16>(x)); }
};
struct Bf16 {
  static float Read(uint32_t x) { return __uint_as_float(x << 16); }
  static uint16_t Round(float x) { return __float2bfloat16(x).bits; }
};

inline uint32_t SharedAddress(const void* p) {
  return static_cast<uint32_t>(static_cast<const uint8_t*>(p) - emulator::memory);
}
inline int Opaque(int x) { return x; }
inline int ThreadIndex() { return emulator::Tid(); }
inline uint3 BlockIndex() { return emulator::ThisBlock().index; }

// ------------------------------------------------------------------------------------------------
// arithmetic

inline float Flushed(float x) { return std::fabs(x) < 0x1p-126f ? std::copysign(0.f, x) : x; }
inline float Ex2(float x) { return Flushed(std::exp2(Flushed(x))); }
inline float Lg2(float x) { return std::log2(Flushed(x)); }
inline float Rcp(float x) { return Flushed(1 / Flushed(x)); }
inline float Rsqrt(float x) { return 1 / std::sqrt(Flushed(x)); }
inline float Select(bool condition, float x, float y) { return condition ? x : y; }
template <typename Operand>
uint32_t Pack(float lo, float hi) {
  return Operand::Round(lo) | uint32_t{Operand::Round(hi)} << 16;
}
template <typename Operand>
uint32_t MulX2(uint32_t a, uint32_t b) {
  return Pack<Operand>(Operand::Read(a) * Operand::Read(b),
                       Operand::Read(a >> 16) * Operand::Read(b >> 16));
}
inline float Bf16Lo(uint32_t pair) { return Bf16::Read(pair); }
inline float Bf16Hi(uint32_t pair) { return Bf16::Read(pair >> 16); }
inline uint32_t MaxBf16X2(uint32_t a, uint32_t b) {
  return Pack<Bf16>(std::fmax(Bf16Lo(a), Bf16Lo(b)), std::fmax(Bf16Hi(a), Bf16Hi(b)));
}
inline uint32_t MaxAbsFp16X2(uint32_t a, uint32_t b) {
  auto larger = [](uint32_t x, uint32_t y) {
    return std::fmax(std::fabs(Fp16::Read(x)), std::fabs(Fp16::Read(y)));
  };
  return Pack<Fp16>(larger(a, b), larger(a >> 16, b >> 16));
}
inline uint32_t RoundTf32(float x) { return __float_as_uint(x) + 0x1000u; }
inline float ReadTf32(uint32_t x) { return __uint_as_float(x & ~0x1fffu); }

// ------------------------------------------------------------------------------------------------
// shared memory

template <int kWords>
struct alignas(4 * kWords) Words {
  uint32_t x[kWords];
};
template <typename T>
T LoadAs(uint32_t a) {
  return std::bit_cast<T>(emulator::Load<Words<sizeof(T) / 4>>(a));
}
template <typename T>
void StoreAs(uint32_t a, const T& x) {
  emulator::Store(a, std::bit_cast<Words<sizeof(T) / 4>>(x));
}
inline uint32_t Lds32(uint32_t a) { return LoadAs<uint32_t>(a); }
inline uint2 Lds64(uint32_t a) { return LoadAs<uint2>(a); }
inline float LdsF32(uint32_t a) { return LoadAs<float>(a); }
inline float2 LdsF32x2(uint32_t a) { return LoadAs<float2>(a); }
inline float4 LdsF32x4(uint32_t a) { return LoadAs<float4>(a); }
inline uint4 Lds128(uint32_t a) { return LoadAs<uint4>(a); }
inline void Sts8(uint32_t a, uint32_t v) { emulator::Store(a, static_cast<uint8_t>(v)); }
inline void Sts16(uint32_t a, uint32_t v) { emulator::Store(a, static_cast<uint16_t>(v)); }
inline void Sts32(uint32_t a, uint32_t v) { StoreAs(a, v); }
inline void Sts64(uint32_t a, uint32_t x, uint32_t y) { StoreAs(a, uint2{x, y}); }
inline void StsF32(uint32_t a, float v) { StoreAs(a, v); }
inline void StsF32x2(uint32_t a, float x, float y) { StoreAs(a, float2{x, y}); }
inline void StsF32x4(uint32_t a, const float* x) { StoreAs(a, float4{x[0], x[1], x[2], x[3]}); }
inline void Sts128(uint32_t a, uint4 v) { StoreAs(a, v); }

// Where the pair that this lane has of each of four 8x8 matrices lies: rows are 16 bytes, at `a` of
// eight lanes each. `transposed`: its two elements are in two rows, `next` bytes from each other.
struct Fragment {
  uint32_t low[4], high[4];
  Fragment(uint32_t a, bool transposed) {
    const auto rows = emulator::Exchange(a);
    const int g = emulator::Lane() / 4, t = emulator::Lane() % 4;
    for (int m = 0; m < 4; ++m) {
      for (int r = 0; r < 8; ++r) emulator::Check(rows[8 * m + r], 16);
      low[m] = transposed ? rows[8 * m + 2 * t] + 2 * g : rows[8 * m + g] + 4 * t;
      high[m] = transposed ? rows[8 * m + 2 * t + 1] + 2 * g : low[m] + 2;
    }
  }
  void Load(uint32_t* r) const {
    for (int m = 0; m < 4; ++m) {
      r[m] = emulator::Load<uint16_t>(low[m]) | uint32_t{emulator::Load<uint16_t>(high[m])} << 16;
    }
    emulator::Exchange(0);
  }
  void Store(uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3) const {
    const uint32_t r[4] = {r0, r1, r2, r3};
    for (int m = 0; m < 4; ++m) {
      emulator::Store(low[m], static_cast<uint16_t>(r[m]));
      emulator::Store(high[m], static_cast<uint16_t>(r[m] >> 16));
    }
    emulator::Exchange(0);
  }
};
inline void Ldmatrix(uint32_t (&r)[4], uint32_t a) { Fragment(a, false).Load(r); }
inline void LdmatrixTrans(uint32_t* r, uint32_t a) { Fragment(a, true).Load(r); }
inline void Stmatrix(uint32_t a, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3) {
  Fragment(a, false).Store(r0, r1, r2, r3);
}
inline void StmatrixTrans(uint32_t a, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3) {
  Fragment(a, true).Store(r0, r1, r2, r3);
}

// ------------------------------------------------------------------------------------------------
// barriers and ordering

// Ends the phase of an mbarrier when all that it expects has come.
inline void EndPhase(emulator::Mbarrier& m) {
  const bool all = m.arrivals == m.expected;  // and with them what they expect
  if (m.arrivals > m.expected || (all && m.bytes < 0)) {
    emulator::Fail("an mbarrier got more than it expects");
  }
  emulator::Release(m.gathered);
  if (all && m.bytes == 0) {
    m.arrivals = 0;
    m.phase ^= 1;
    emulator::Join(m.released, m.gathered);
  }
  ++emulator::cluster->progress;
}
inline emulator::Mbarrier& FindClusterMbarrier(uint32_t bar) {
  if (!emulator::cluster->mbarriers.contains(bar)) emulator::Fail("an mbarrier is not initialised");
  if (emulator::cluster->blocks[bar / emulator::kWindow].running == 0) {
    emulator::Fail("an mbarrier is of a block that has ended");
  }
  return emulator::cluster->mbarriers.at(bar);
}
inline emulator::Mbarrier& FindMbarrier(uint32_t bar) {
  emulator::Check(bar, 8);
  return FindClusterMbarrier(bar);
}
// Of what the copy engine has brought; only another block's may come before it is expected.
inline void CompleteTx(uint32_t bar, uint32_t bytes) {
  emulator::Mbarrier& m = FindClusterMbarrier(bar);
  m.bytes -= bytes;
  if (m.bytes < 0 && bar / emulator::kWindow == emulator::Rank()) {
    emulator::Fail("an mbarrier got more than it expects");
  }
  EndPhase(m);
}
inline void MbarrierInit(uint32_t bar, uint32_t arrivals) {
  emulator::Check(bar, 8);
  const emulator::Clock none(emulator::cluster->warps.size());
  emulator::cluster->mbarriers[bar] = {
      .expected = static_cast<int>(arrivals), .gathered = none, .released = none};
}
inline void FenceMbarrierInit() {}
inline void MbarrierExpectTx(uint32_t bar, uint32_t bytes) {
  emulator::Mbarrier& m = FindMbarrier(bar);
  m.bytes += bytes;
  ++m.arrivals;
  EndPhase(m);
}
inline void MbarrierArrive(uint32_t bar) {
  emulator::Mbarrier& m = FindMbarrier(bar);
  ++m.arrivals;
  EndPhase(m);
}
inline void MbarrierWait(uint32_t bar, uint32_t parity) {
  const emulator::Mbarrier& m = FindMbarrier(bar);
  emulator::WaitFor([&] { return m.phase != parity; });
  emulator::Acquire(m.released);
}
inline uint32_t Mapa(uint32_t a, uint32_t rank) {
  if (rank >= emulator::cluster->blocks.size()) emulator::Fail("no block of the cluster");
  return a % emulator::kWindow + rank * emulator::kWindow;
}
inline void MbarrierArriveCluster(uint32_t bar) {
  emulator::Mbarrier& m = FindClusterMbarrier(bar);
  ++m.arrivals;
  EndPhase(m);
}
inline void ClusterSync() {
  emulator::Sync(emulator::cluster->barrier, static_cast<int>(emulator::cluster->fibers.size()));
}
inline void BarSync(int id, int threads) {
  emulator::Sync(emulator::ThisBlock().barriers[id], threads);
}
inline void GriddepcontrolLaunchDependents() {}
inline void GriddepcontrolWait() {}
inline void FenceProxyAsync() {}

// ------------------------------------------------------------------------------------------------
// the copy engine

// Calls `copy` with the global and the shared address of every row of a tile; the first is nullptr
// outside the tensor.
template <typename Copy>
void ForTile(uint32_t shared, const CUtensorMap* map, int head, int token, int half, Copy copy) {
  for (uint32_t h = 0; h < map->box[3]; ++h) {
    for (uint32_t r = 0; r < map->box[2]; ++r) {
      const bool inside = token + r < map->sizes[2] && half + h < map->sizes[3];
      uint8_t* row = map->data + head * map->strides[0] + (token + r) * map->strides[1] +
                     (half + h) * map->strides[2];
      for (uint32_t piece = 0; piece < 8; ++piece) {
        copy(inside ? row + piece * 16 : nullptr,
             shared + h * 8192 + r * 128 + ((piece ^ (r & 7)) << 4));
      }
    }
  }
}
inline void TmaLoad(uint32_t dst, const CUtensorMap* map, uint32_t bar, int head, int token,
                    int half) {
  emulator::Check(dst, 1024);
  ForTile(dst, map, head, token, half, [](const uint8_t* from, uint32_t to) {
    emulator::Note(to, 16, true, true);
    std::memset(emulator::memory + to, 0, 16);
    if (from != nullptr) std::memcpy(emulator::memory + to, from, 16);
  });
  CompleteTx(bar, map->box[3] * 8192);
}
inline void TmaStore(const CUtensorMap* map, uint32_t src, int head, int token, int half) {
  emulator::Check(src, 1024);
  emulator::cluster->current->copies.push_back([=] {
    ForTile(src, map, head, token, half, [](uint8_t* to, uint32_t from) {
      emulator::Note(from, 16, false, true);
      if (to != nullptr) std::memcpy(to, emulator::memory + from, 16);
    });
  });
}
inline void BulkLoadMulticast(uint32_t dst, const void* src, uint32_t bytes, uint32_t bar,
                              uint32_t ranks) {
  if (bytes % 16 != 0 || reinterpret_cast<uintptr_t>(src) % 16 != 0) {
    emulator::Fail("a bulk load that is not in units of 16 bytes");
  }
  emulator::Check(dst, 16);
  emulator::Check(dst + bytes - 16, 16);
  emulator::Check(bar, 8);
  for (uint32_t rank = 0; ranks >> rank != 0; ++rank) {
    if ((ranks >> rank & 1) == 0) continue;
    const uint32_t to = Mapa(dst, rank);
    emulator::Note(to, bytes, true, true);
    std::memcpy(emulator::memory + to, src, bytes);
    CompleteTx(Mapa(bar, rank), bytes);
  }
}
inline void BulkLoad(uint32_t dst, const void* src, uint32_t bytes, uint32_t bar) {
  BulkLoadMulticast(dst, src, bytes, bar, 1u << emulator::Rank());
}
inline void BulkStore(void* dst, uint32_t src, uint32_t bytes) {
  if (bytes % 16 != 0 || reinterpret_cast<uintptr_t>(dst) % 16 != 0) {
    emulator::Fail("a bulk store that is not in units of 16 bytes");
  }
  emulator::Check(src, 16);
  emulator::Check(src + bytes - 16, 16);
  emulator::cluster->current->copies.push_back([=] {
    emulator::Note(src, bytes, false, true);
    std::memcpy(dst, emulator::memory + src, bytes);
  });
}
inline void BulkCommit() {}
inline void BulkWaitRead() {
  for (int i = 0; i < 3; ++i) {  // meanwhile the others go on
    ++emulator::cluster->progress;
    emulator::Yield();
  }
  for (const auto& copy : emulator::cluster->current->copies) copy();
  emulator::cluster->current->copies.clear();
}
inline void BulkWait() { BulkWaitRead(); }

// ------------------------------------------------------------------------------------------------
// tensor cores

// d += a b of one warp: 16 x K times K x 8, in fragments of kPacked elements a register. `read`
// makes a number of a register's i-th element.
template <int kPacked, int kA, int kB, typename Read>
void WarpProduct(float (&d)[4], const uint32_t (&a)[kA], const uint32_t (&b)[kB], Read read) {
  struct Registers {
    uint32_t a[kA], b[kB];
  } mine;
  std::copy_n(a, kA, mine.a);
  std::copy_n(b, kB, mine.b);
  const auto all = emulator::Exchange(mine);
  const int g = emulator::Lane() / 4, t = emulator::Lane() % 4;
  for (int i = 0; i < 4; ++i) {
    const int row = g + i / 2 * 8, column = 2 * t + i % 2;
    double sum = d[i];
    for (int k = 0; k < 4 * kPacked * kB; ++k) {
      const int lane = k / kPacked % 4, part = k / (4 * kPacked);
      sum += double{read(all[row % 8 * 4 + lane].a[row / 8 + 2 * part], k % kPacked)} *
             read(all[column * 4 + lane].b[part], k % kPacked);
    }
    d[i] = static_cast<float>(sum);
  }
}
template <typename Operand>
float ReadHalf(uint32_t pair, int i) {
  return Operand::Read(pair >> 16 * i & 0xffff);
}
template <typename Operand>
void Mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  WarpProduct<2>(d, a, {b0, b1}, ReadHalf<Operand>);
}
inline void MmaK8(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t b) {
  WarpProduct<2>(d, {a0, a1}, {b}, ReadHalf<Bf16>);
}
inline void MmaTf32(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  WarpProduct<1>(d, a, {b0, b1}, [](uint32_t x, int) { return ReadTf32(x); });
}

inline void WgmmaFence() {}
inline void WgmmaCommit() {}
template <int N>
void WgmmaWait() {}
// A descriptor is what it is on the GPU.
template <int kRow = 128>
uint64_t WgmmaDescriptor(uint32_t address, uint32_t half_bytes) {
  return ((address & 0x3ffff) >> 4) | (uint64_t{half_bytes >> 4} << 16) |
         (uint64_t{kRow / 2} << 32) | (uint64_t{kRow == 128 ? 1 : 3} << 62);
}
// Element (row, k) of a K-major matrix of 16-bit numbers, or (k, row) of a transposed one.
template <typename Operand>
float ReadMatrix(uint64_t descriptor, bool transposed, int row, int k) {
  const uint32_t start = emulator::Rank() * emulator::kWindow + ((descriptor & 0x3fff) << 4);
  const uint32_t half = (descriptor >> 16 & 0x3fff) << 4;
  if (descriptor >> 62 == 3) {  // rows of 32 bytes
    const uint32_t at = start + row * 32 + k * 2;
    return Operand::Read(emulator::Load<uint16_t>(at ^ (at >> 7 & 1) << 4));
  }
  const int line = transposed ? k : row, element = transposed ? row : k;
  const uint32_t at =
      start + line / 8 * 1024 + line % 8 * 128 + element / 64 * half + element % 64 * 2;
  return Operand::Read(emulator::Load<uint16_t>(at ^ (at >> 7 & 7) << 4));
}
// d[16 rows of this warp, N] (+)= a[16, 16] b[N, 16]^T; `a` reads an element by row and k.
template <typename Operand, int kN, typename ReadA>
void RowsProduct(float* d, ReadA a, uint64_t b, bool transposed, int accumulate) {
  const int g = emulator::Lane() / 4, t = emulator::Lane() % 4;
  float rows[2][16];
  for (int k = 0; k < 16; ++k) rows[0][k] = a(g, k), rows[1][k] = a(g + 8, k);
  for (int n = 0; n < kN / 8; ++n) {
    for (int e = 0; e < 2; ++e) {
      float column[16];
      for (int k = 0; k < 16; ++k) {
        column[k] = ReadMatrix<Operand>(b, transposed, 8 * n + 2 * t + e, k);
      }
      for (int r = 0; r < 2; ++r) {
        float& out = d[4 * n + 2 * r + e];
        double sum = accumulate ? out : 0;
        for (int k = 0; k < 16; ++k) sum += double{rows[r][k]} * column[k];
        out = static_cast<float>(sum);
      }
    }
  }
}
template <typename Operand>
auto RegisterRows(const uint32_t* a) {
  struct Registers {
    uint32_t a[4];
  };
  return [all = emulator::Exchange(Registers{{a[0], a[1], a[2], a[3]}})](int row, int k) {
    return ReadHalf<Operand>(all[row % 8 * 4 + k / 2 % 4].a[row / 8 + k / 8 * 2], k % 2);
  };
}
template <typename Operand, int kTrans = 0>
void Wgmma64x64(float (&d)[32], const uint32_t* a, uint64_t b, int accumulate) {
  RowsProduct<Operand, 64>(d, RegisterRows<Operand>(a), b, kTrans != 0, accumulate);
}
template <typename Operand>
void Wgmma64x128Trans(float (&d)[64], const uint32_t* a, uint64_t b) {
  RowsProduct<Operand, 128>(d, RegisterRows<Operand>(a), b, true, 1);
}
template <int kTrans>
void Wgmma64x32(float (&d)[4][4], uint64_t a, uint64_t b, int accumulate) {
  const int first = emulator::Tid() / 32 % 4 * 16;
  RowsProduct<Bf16, 32>(
      &d[0][0], [=](int row, int k) { return ReadMatrix<Bf16>(a, kTrans != 0, first + row, k); }, b,
      false, accumulate);
}
template <int kRegisters>
void SetMaxNRegInc() {}
template <int kRegisters>
void SetMaxNRegDec() {}

}  // namespace jax_kda::sm90
