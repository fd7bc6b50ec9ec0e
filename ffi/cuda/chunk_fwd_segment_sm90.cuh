// What a block of a scan works on: a sequence, a segment of one, or what of a row is in a slice.
#pragma once

#include <cstdint>

#include "../common/slots.h"
#include "chunk_fwd_sm90.cuh"

namespace jax_kda::sm90 {

// What a block scans: a sequence, or a segment of one.
struct Segment {
  int token, length, before, after, malformed;  // as in SequenceSlot; it fills what it is next to
  int64_t first_chunk, n;
  int64_t number = 0, chunk = 0;   // its own, and its first chunk's in the sequence
  bool first = true, last = true;  // of its sequence
  StateSlots slots = {};
};
__device__ inline Segment FindTokens(const FwdParams& p, const Workspace& ws, int64_t n) {
  if (ws.sequences != nullptr) {
    const SequenceSlot s = ws.sequences[n];
    return {s.token, s.length, s.before, s.after, s.malformed, s.first_chunk, n};
  }
  const int T = static_cast<int>(p.T), token = static_cast<int>(n * p.T);
  return {token, T, token, token + T, 0, n * ((T + kChunk - 1) / kChunk), n};
}
__device__ inline int64_t SegmentsOf(const FwdParams& p, const Segment& sequence) {
  const int64_t tokens = p.segment_chunks * kChunk;
  return max(int64_t{1}, (sequence.length + tokens - 1) / tokens);
}
// Segment `number`; nobody's has no token and is neither the first nor the last.
__device__ inline Segment FindSegment(const FwdParams& p, const Workspace& ws, int64_t number) {
  auto first_segment = [&](int64_t n) {
    return FirstSegment(p, n, ws.sequences != nullptr ? ws.sequences[n].first_chunk : 0);
  };
  int64_t low = 0, high = p.B * p.M - 1;  // the last sequence that starts at or before it
  while (low < high) {
    const int64_t middle = (low + high + 1) / 2;
    if (first_segment(middle) <= number) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  Segment s = FindTokens(p, ws, low);
  const int64_t i = number - first_segment(low), segments = SegmentsOf(p, s);
  s.number = number;
  s.chunk = i * p.segment_chunks;
  s.first_chunk += s.chunk;
  s.first = i == 0;
  s.last = i == segments - 1;
  const int64_t skipped = min(s.chunk * kChunk, int64_t{s.length});
  s.token += static_cast<int>(skipped);
  s.length = static_cast<int>(min(p.segment_chunks * kChunk, s.length - skipped));
  if (!s.first) s.before = s.token;
  if (!s.last) s.after = s.token + s.length;
  return s;
}
__device__ inline Segment FindWork(const FwdParams& p, const Workspace& ws, int64_t rank) {
  Segment s = ws.segments > 0           ? FindSegment(p, ws, rank)
              : ws.sequences != nullptr ? FindTokens(p, ws, ws.sequences[rank].order)
                                        : FindTokens(p, ws, rank);
  s.slots = FindStateSlots(p, s.n);
  if (s.slots.padding) s.length = 0;  // its tokens, up to `after`, are no sequence's
  return s;
}

// What of a row is in the slice, from the state that the slice before left.
__device__ inline void CutToSlice(Segment& s, const Slice& slice) {
  const int begin = min(static_cast<int>(slice.first) * kChunk, s.length);
  const int end = min(begin + static_cast<int>(slice.count) * kChunk, s.length);
  s.chunk = slice.first;
  s.first_chunk += slice.first;
  s.first = begin == 0;
  s.last = end == s.length;
  if (!s.last) s.after = s.token + end;
  s.token += begin;
  if (!s.first) s.before = s.token;
  s.length = end - begin;
}

}  // namespace jax_kda::sm90
