// Where the sequences lie: offsets checked, then one chain of chunks for each (sequence, value
// head).
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "ffi/common/params.h"
#include "ffi/cpu/states.h"
#include "xla/ffi/api/ffi.h"

namespace jax_kda::cpu {

namespace ffi = ::xla::ffi;

struct Sequence {
  int64_t begin, end;  // tokens of its row
};

// Sequence m of row b. Not yet trusted when it comes from offsets.
inline Sequence SequenceAt(const FwdParams& p, int64_t b, int64_t m) {
  switch (p.offsets_step) {
    case 1: {
      const int32_t* row = p.offsets + b * (p.M + 1);
      return {row[m], row[m + 1]};
    }
    case 2: {
      const int32_t* row = p.offsets + b * p.M * 2;
      return {row[2 * m], row[2 * m + 1]};
    }
    default:
      return {0, p.T};
  }
}

// In the words of the user, whose argument became the offsets.
inline ffi::Error MalformedRow(const FwdParams& p, int64_t b, const std::string& rule,
                               const std::string& got) {
  const std::string name = p.offsets_step == 1 ? "cu_seqlens" : "segment_ids";
  return ffi::Error::InvalidArgument("`" + name + "` of row " + std::to_string(b) + " must " +
                                     rule + "; got " + got);
}

// An error for the first malformed row. After it every Sequence is inside its row and in order.
inline ffi::Error CheckOffsets(const FwdParams& p) {
  if (p.offsets_step == 0) return ffi::Error::Success();
  for (int64_t b = 0; b < p.B; ++b) {
    if (p.offsets_step == 1 && p.offsets[b * (p.M + 1)] != 0) {
      return MalformedRow(p, b, "start with 0", std::to_string(p.offsets[b * (p.M + 1)]));
    }
    int64_t last = 0;
    for (int64_t m = 0; m < p.M; ++m) {
      const Sequence s = SequenceAt(p, b, m);
      const std::string got = "[" + std::to_string(s.begin) + ", " + std::to_string(s.end) +
                              "] for sequence " + std::to_string(m);
      if (p.offsets_step == 2 && s.begin == -1) {  // Python's mark for a row that does not fit
        return ffi::Error::InvalidArgument(
            "`max_segments` must be at least the number of segments in every row; got " +
            std::to_string(p.M) + ", too few for row " + std::to_string(b) + " of `segment_ids`");
      }
      if (s.begin < last || s.end < s.begin) return MalformedRow(p, b, "not decrease", got);
      if (s.end > p.T) return MalformedRow(p, b, "end by T = " + std::to_string(p.T), got);
      last = s.end;
    }
  }
  return ffi::Error::Success();
}

inline void ZeroTokens(const FwdParams& p, int64_t b, int64_t begin, int64_t end) {
  if (begin >= end) return;
  const int64_t token_bytes = p.HV * p.V * (p.dtype == DType::kBF16 ? 2 : 4);
  std::memset(static_cast<std::byte*>(p.o) + (b * p.T + begin) * token_bytes, 0,
              (end - begin) * token_bytes);
}

// Tokens of no sequence, and those of padding, get o = 0.
inline void ZeroGaps(const FwdParams& p) {
  for (int64_t b = 0; b < p.B; ++b) {
    int64_t last = 0;
    for (int64_t m = 0; m < p.M; ++m) {
      const Sequence s = SequenceAt(p, b, m);
      ZeroTokens(p, b, last, FindStateSlots(p, b * p.M + m).padding ? s.end : s.begin);
      last = s.end;
    }
    ZeroTokens(p, b, last, p.T);
  }
}

// The chunks of one sequence for one value head: a dependent chain through its state.
struct Chain {
  int64_t b, hv;
  int64_t begin, end;   // tokens of row b
  int64_t n;            // the sequence
  int64_t read, write;  // indices of [V, K] in the states, or kNoSlot

  int64_t chunks() const { return (end - begin + kChunk - 1) / kChunk; }
};

// None for padding. Longest first, so that no worker begins a long chain last.
inline std::vector<Chain> MakeChains(const FwdParams& p) {
  std::vector<Chain> chains;
  chains.reserve(p.B * p.M * p.HV);
  for (int64_t b = 0; b < p.B; ++b) {
    for (int64_t m = 0; m < p.M; ++m) {
      const int64_t n = b * p.M + m;
      const Sequence s = SequenceAt(p, b, m);
      const StateSlots slots = FindStateSlots(p, n);
      if (slots.padding) continue;
      for (int64_t hv = 0; hv < p.HV; ++hv) {
        chains.push_back({b, hv, s.begin, s.end, n, HeadState(p, slots.read, hv),
                          HeadState(p, slots.write, hv)});
      }
    }
  }
  std::stable_sort(chains.begin(), chains.end(),
                   [](const Chain& x, const Chain& y) { return x.chunks() > y.chunks(); });
  return chains;
}

}  // namespace jax_kda::cpu
