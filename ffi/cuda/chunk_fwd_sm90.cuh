// What the kernels of the Hopper forward share: tile constants, the image of a chunk, the
// workspace.
//
//   plan       (packed rows only)  offsets -> which tokens each chunk and each sequence has
//   prepare    (chunk, value head)     q k g beta -> the chunk's image: all that needs no state
//   scan       (sequence, value head)  images, v, initial_state -> o, final_state
//
// Long rows are prepared and scanned in slices, so that SMs that a scan leaves idle prepare what it
// needs next. Where chains are few and long, the scan is cut into segments, exactly:
//
//   summarise  (segment, value head)   images, v -> what the segment does to a state: S T + C
//   combine    (sequence, value head)  T, C -> the state at each segment's end
//   scan       (segment, value head)   as above, each segment from the state before it
//
// The sums of decays, the products and the inverse are derived in docs/math.md, the schedule and
// the floors in docs/kernels.md.
#pragma once

#include <cstdint>
#include <type_traits>

#include "../common/params.h"
#include "sm90.cuh"

namespace jax_kda::sm90 {

inline constexpr int kSms = 132;   // of an H100 or H200
inline constexpr int kHead = 128;  // K and V in shared memory and in the workspace
inline constexpr int kTile =
    kChunk * kHead * 2;  // bytes of a 64 x 128 tile of 16-bit numbers, in two 64-column halves
inline constexpr int kHalfTile = kTile / 2;
inline constexpr int kState = kHead * kHead * 4;     // bytes of an fp32 state
inline constexpr int kMatrix = kChunk * kChunk * 2;  // bytes of a 64 x 64 matrix of 16-bit numbers

// A lower triangular 64 x 64 matrix of 16-bit numbers, as the scan moves it, in slabs of 16
// columns. Slab j has its rows from 16 j on, 32 bytes each; the 16-byte piece p of row r is at
// p ^ (r / 4 & 1). In shared memory a slab has all 64 rows, the first of them zeros.
namespace triangle {
inline constexpr int kSlabs = 4, kRow = 32, kSlab = kChunk * kRow;
__host__ __device__ constexpr int Zeros(int slab) { return 16 * slab * kRow; }  // bytes
__host__ __device__ constexpr int Size(int slab) { return kSlab - Zeros(slab); }
__host__ __device__ constexpr int Slab(int slab) {  // where it begins: behind those before
  return slab * kSlab - Zeros(slab) * (slab - 1) / 2;
}
inline constexpr int kBytes = Slab(kSlabs);
static_assert(kBytes == 10 * 16 * kRow, "ten of 16 blocks");
// Piece `piece` (0..7) of row `row`, which is not above the slab's rows.
__device__ __forceinline__ uint32_t Place(uint32_t row, uint32_t piece) {
  const uint32_t slab = piece >> 1;
  return Slab(slab) - Zeros(slab) + row * kRow + (((piece ^ (row >> 2)) & 1) << 4);
}
}  // namespace triangle

// The image of one chunk and head in the workspace. Tiles and matrices are stored as the tensor
// cores read them from shared memory: rows of 128 bytes, the 16-byte piece p of row r at p ^ (r %
// 8).
namespace image {
inline constexpr int kQDecayed = 0;           // [64, K]   q exp(G)
inline constexpr int kKDecayed = kTile;       // [64, K]   k exp(G)
inline constexpr int kKRestored = 2 * kTile;  // [64, K]   k exp(G_last - G)
inline constexpr int kAInv = 3 * kTile;       // triangle  (I + diag(beta) Akk)^-1 diag(beta)
inline constexpr int kAqk = kAInv + triangle::kBytes;   // triangle  q_i k_j exp(G_i - G_j), i >= j
inline constexpr int kDecay = kAqk + triangle::kBytes;  // [K] fp32  exp(G_last)
// A bit per token, where keys are normalised: 0 if its key or beta is zero, so that it writes
// nothing.
inline constexpr int kWrites = kDecay + kHead * 4;
inline constexpr int kDecayBytes = kHead * 4 + 16;  // of decay and writes, as they are copied
// Whole lines of 128 bytes: copies of images that straddle lines made the scan 5% slower.
inline constexpr int kBytes = (kDecay + kDecayBytes + 127) / 128 * 128;
}  // namespace image

// The image that the gradient is computed from has the same operands and ends otherwise, because it
// needs what is in A_inv before beta is multiplied onto either side, and beta may be 0. Both
// without their diagonals of 1. Matrices are whole: they are read transposed as well.
namespace gradient_image {
inline constexpr int kYInv = 3 * kTile;        // [64, 64]  (I + diag(beta) Akk)^-1
inline constexpr int kAqk = kYInv + kMatrix;   // [64, 64]
inline constexpr int kEInv = kAqk + kMatrix;   // [64, 64]  (I + Akk diag(beta))^-1
inline constexpr int kBeta = kEInv + kMatrix;  // [64] fp32
inline constexpr int kBetaBytes = kChunk * 4;
inline constexpr int kDecay = kBeta + kBetaBytes;  // [K] fp32, and which tokens write, as above
inline constexpr int kBytes = (kDecay + image::kDecayBytes + 127) / 128 * 128;
}  // namespace gradient_image
static_assert(image::kDecayBytes % 16 == 0, "bulk copies move 16 bytes");
static_assert(image::kBytes <= 59 * 1024, "what the README says");

// One chunk: `valid` tokens from global token `token` (0 <= token < B T); valid = 0: no chunk in
// this slot.
struct ChunkSlot {
  int32_t token;
  int32_t valid;
  int32_t row;
  int32_t unused;
};
// One sequence: tokens [token, token + length), its chunks from slot `first_chunk`, its state `n`.
// It also owns the tokens of no sequence in [before, token) and [token + length, after), which get
// o = 0 (NaN in a malformed row).
struct SequenceSlot {
  int32_t token;
  int32_t length;
  int32_t first_chunk;
  int32_t before;
  int32_t after;
  int32_t malformed;      // of its row: final_state is NaN
  int32_t row_malformed;  // used by the plan kernel, in the row's first slot
  int32_t order;          // the sequence that the r-th scan takes, longest first
};
static_assert(sizeof(ChunkSlot) == 16 && sizeof(SequenceSlot) == 32);

struct Workspace {
  std::byte* images;        // [NT, HV, image::kBytes]
  float* segment_states;    // [segments, HV, V, K]  contribution, then the state at the end
  float* transitions;       // [segments, HV, K, K]; of a first segment, the initial state
  float* slice_states;      // [N, HV, V, K]  at the end of the last slice that was scanned
  SequenceSlot* sequences;  // [N]; nullptr when rows are not packed
  ChunkSlot* chunks;        // [NT]; nullptr when rows are not packed
  int64_t NT;               // chunk slots
  int64_t segments;         // numbers of segments; 0: sequences are scanned whole
};

// Chunks of each row that a launch of prepare or scan is for; all of them where rows are packed.
struct Slice {
  uint32_t first, count;
};

__host__ __device__ inline int64_t ChunkSlots(int64_t B, int64_t T, int64_t M, bool packed) {
  // A sequence of length l has ceil(l / 64) <= (l + 63) / 64 chunks.
  return packed ? B * ((T + (kChunk - 1) * M) / kChunk) : B * ((T + kChunk - 1) / kChunk);
}

// Segments of n are numbered from here on: rows are alike or, when packed, begin at chunk slot
// `first_chunk`. Then no two numbers are alike either, but some are nobody's.
__host__ __device__ inline int64_t FirstSegment(const FwdParams& p, int64_t n,
                                                int64_t first_chunk) {
  if (p.offsets != nullptr) return first_chunk / p.segment_chunks + n;
  const int64_t tokens = p.segment_chunks * kChunk;
  return n * ((p.T + tokens - 1) / tokens);
}
inline int64_t Segments(int64_t B, int64_t T, int64_t M, bool packed, int64_t segment_chunks) {
  if (segment_chunks == 0) return 0;
  if (packed) return ChunkSlots(B, T, M, packed) / segment_chunks + B * M;
  return B * ((T + segment_chunks * kChunk - 1) / (segment_chunks * kChunk));
}

// Lays the workspace out in memory from `base` on; its size goes to `bytes`.
inline Workspace LayOut(std::byte* base, int64_t B, int64_t T, int64_t HV, int64_t M, bool packed,
                        int64_t segment_chunks, int64_t slice_chunks, int64_t* bytes) {
  Workspace ws = {};
  ws.NT = ChunkSlots(B, T, M, packed);
  ws.segments = Segments(B, T, M, packed, segment_chunks);
  int64_t at = 0;
  const auto take = [&](auto*& array, int64_t size) {
    array = reinterpret_cast<std::remove_reference_t<decltype(array)>>(base + at);
    at += size;
  };
  take(ws.images, ws.NT * HV * image::kBytes);
  take(ws.segment_states, ws.segments * HV * kState);
  take(ws.transitions, ws.segments * HV * kState);
  take(ws.slice_states, slice_chunks > 0 ? B * M * HV * kState : 0);
  if (packed) {
    take(ws.sequences, B * M * int64_t{sizeof(SequenceSlot)});
    take(ws.chunks, ws.NT * int64_t{sizeof(ChunkSlot)});
  }
  *bytes = at + 256;
  return ws;
}

// Slot `i` of a slice of rows that are not packed.
__device__ inline uint32_t SlotInSlice(const FwdParams& p, const Slice& slice, uint32_t i) {
  const uint32_t row = p.B == 1 ? 0 : i / slice.count;
  const uint32_t chunks_per_row = (static_cast<uint32_t>(p.T) + kChunk - 1) / kChunk;
  return row * (chunks_per_row - slice.count) + slice.first + i;
}
__device__ inline ChunkSlot FindChunk(const FwdParams& p, const Workspace& ws, uint32_t slot) {
  if (ws.chunks != nullptr) return ws.chunks[slot];
  const uint32_t T = static_cast<uint32_t>(p.T), chunks_per_row = (T + kChunk - 1) / kChunk;
  const uint32_t row = p.B == 1 ? 0 : slot / chunks_per_row,
                 first = (slot - row * chunks_per_row) * kChunk;
  return {static_cast<int32_t>(row * T + first),
          static_cast<int32_t>(min(uint32_t{kChunk}, T - first)), static_cast<int32_t>(row), 0};
}

// The 16-byte piece `piece` (0..7) of row `row` in a swizzled tile or matrix.
__device__ __forceinline__ uint32_t Swizzled(uint32_t row, uint32_t piece) {
  return row * 128 + ((piece ^ (row & 7)) << 4);
}
// The same place as `at`, but `row` rows further: at most 7, from a row that is 0 modulo a power of
// two above `row`.
__device__ __forceinline__ uint32_t InRow(uint32_t at, uint32_t row) {
  return (at ^ (row << 4)) + row * 128;
}

}  // namespace jax_kda::sm90
