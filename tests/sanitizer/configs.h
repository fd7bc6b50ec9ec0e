// What the drivers call, CPU and CUDA: configurations, random operands on the host, and a judgement
// of results that needs no reference. Numbers are the Python tests' business.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "ffi/common/params.h"

namespace jax_kda {

// Neither state; a final one; an initial one too; an initial one alone.
enum class State { kNone, kFinal, kBoth, kInitial };

struct Config {
  const char* name;
  int64_t B, T, H, HV;
  int64_t K = 128;
  int64_t V = 128;
  Gate gate = Gate::kLowerBound;
  BetaMode beta_mode = BetaMode::kSigmoid;
  bool l2norm = true;
  bool biased = true;  // A_log and dt_bias are given (raw gates)
  DType dtype = DType::kBF16;
  DType g_dtype = DType::kBF16;
  DType beta_dtype = DType::kBF16;
  DType state_dtype = DType::kF32;
  State state = State::kBoth;
  int64_t offsets_step = 0;
  std::vector<int32_t> offsets = {};
  std::vector<int64_t> malformed_rows = {};
  float gate_mean = 0;
  int64_t segment_chunks = 0;  // 0: scans are not cut
  int64_t slice_chunks = 0;    // 0: everything is prepared at once

  // States in pools, 0: none. Empty indices are not given.
  int64_t pools = 0;
  int64_t slots = 0;
  std::vector<int32_t> state_indices = {};
  std::vector<int32_t> output_state_indices = {};
  std::vector<int32_t> checkpoint_indices = {};
  bool in_place = false;  // final_state is the memory of initial_state

  int64_t M() const {
    const int64_t per_row = static_cast<int64_t>(offsets.size()) / B;
    return offsets_step == 0 ? 1 : offsets_step == 1 ? per_row - 1 : per_row / 2;
  }
  int64_t states() const { return (pools > 0 ? pools * slots : B * M()) * HV * V * K; }
  bool has_initial_state() const { return state == State::kBoth || state == State::kInitial; }
  bool has_final_state() const { return state == State::kBoth || state == State::kFinal; }
  int64_t values() const { return B * T * HV * V; }
};

// clang-format off
inline const std::vector<Config> kConfigs = {
    {.name = "one token", .B = 2, .T = 1, .H = 1, .HV = 1},
    {.name = "one short of a chunk, softplus gate, no state",
     .B = 1, .T = 63, .H = 2, .HV = 2, .gate = Gate::kSoftplus, .state = State::kNone},
    {.name = "one past a chunk, activated f32 gate, f32 beta, bf16 state",
     .B = 1, .T = 65, .H = 1, .HV = 2, .gate = Gate::kActivated, .beta_mode = BetaMode::kProbability,
     .l2norm = false, .g_dtype = DType::kF32, .beta_dtype = DType::kF32, .state_dtype = DType::kBF16,
     .gate_mean = -1},
    {.name = "strong activated gate, two-sigmoid beta, a final state only",
     .B = 1, .T = 130, .H = 1, .HV = 1, .gate = Gate::kActivated, .beta_mode = BetaMode::kTwoSigmoid,
     .state = State::kFinal, .gate_mean = -60},
    {.name = "raw gate without parameters, f32 g, bf16 state",
     .B = 2, .T = 191, .H = 2, .HV = 4, .biased = false, .g_dtype = DType::kF32,
     .state_dtype = DType::kBF16},
    {.name = "softplus gate, f32 g and beta, grouped value heads",
     .B = 1, .T = 200, .H = 2, .HV = 8, .gate = Gate::kSoftplus, .g_dtype = DType::kF32,
     .beta_dtype = DType::kF32},
    {.name = "more chains than an H200 has multiprocessors", .B = 2, .T = 129, .H = 70, .HV = 70},
    {.name = "more chains than multiprocessors, softplus gate, bf16 state",
     .B = 3, .T = 65, .H = 48, .HV = 48, .gate = Gate::kSoftplus, .state_dtype = DType::kBF16},
    {.name = "packed, with empty sequences and a tail of no sequence",
     .B = 1, .T = 200, .H = 2, .HV = 2, .offsets_step = 1, .offsets = {0, 0, 5, 69, 69, 190, 190}},
    {.name = "packed, sequences of one token, activated gate, bf16 state",
     .B = 1, .T = 9, .H = 1, .HV = 1, .gate = Gate::kActivated, .state_dtype = DType::kBF16,
     .offsets_step = 1, .offsets = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9}, .gate_mean = -1},
    {.name = "segments with gaps, rows that differ, unused segments",
     .B = 2, .T = 150, .H = 2, .HV = 2, .offsets_step = 2,
     .offsets = {3, 70, 75, 150, 150, 150, 0, 0, 0, 64, 100, 149}},
    {.name = "malformed: past the end, decreasing, a first offset that is not 0; one row is good",
     .B = 4, .T = 90, .H = 1, .HV = 2, .offsets_step = 1,
     .offsets = {0, 40, 2147483647, 0, 60, 30, 7, 50, 90, 0, 30, 90}, .malformed_rows = {0, 1, 2}},
    {.name = "malformed segments: negative, overlapping, backwards, past the end; one row is good",
     .B = 5, .T = 70, .H = 1, .HV = 1, .offsets_step = 2,
     .offsets = {-1, -1, -1, -1, 0, 40, 30, 70, 50, 20, 60, 70, 0, 10, 20, 71, 0, 10, 20, 70},
     .malformed_rows = {0, 1, 2, 3}},
    {.name = "head sizes K = 64, V = 128, softplus gate, f32 g",
     .B = 2, .T = 100, .H = 1, .HV = 2, .K = 64, .gate = Gate::kSoftplus, .g_dtype = DType::kF32},
    {.name = "head sizes K = 128, V = 64, packed, bf16 state",
     .B = 1, .T = 150, .H = 2, .HV = 2, .V = 64, .state_dtype = DType::kBF16, .offsets_step = 1,
     .offsets = {0, 64, 69, 149}},
    {.name = "head sizes K = V = 64, cut, in place",
     .B = 1, .T = 300, .H = 1, .HV = 2, .K = 64, .V = 64, .segment_chunks = 1, .in_place = true},
    {.name = "cut: segments of one chunk, rows in place",
     .B = 2, .T = 250, .H = 1, .HV = 2, .segment_chunks = 1, .in_place = true},
    {.name = "cut: segments of two chunks, activated gate, bf16 state, no final state",
     .B = 1, .T = 385, .H = 1, .HV = 1, .gate = Gate::kActivated, .l2norm = false,
     .state_dtype = DType::kBF16, .state = State::kInitial, .gate_mean = -1, .segment_chunks = 2},
    {.name = "cut: packed, with sequences of one segment, of many, and of none",
     .B = 1, .T = 600, .H = 2, .HV = 2, .offsets_step = 1,
     .offsets = {0, 0, 5, 70, 140, 460, 460, 590}, .segment_chunks = 1},
    {.name = "slices of two chunks, rows in place",
     .B = 2, .T = 330, .H = 1, .HV = 2, .slice_chunks = 2, .in_place = true},
    {.name = "slices of one chunk, bf16 state, no final state",
     .B = 1, .T = 257, .H = 2, .HV = 2, .state_dtype = DType::kBF16, .state = State::kInitial,
     .slice_chunks = 1},
    {.name = "cut: segments with gaps, a malformed row",
     .B = 3, .T = 300, .H = 1, .HV = 2, .offsets_step = 2,
     .offsets = {3, 200, 210, 300, 0, 40, 30, 70, 0, 300, 300, 300}, .malformed_rows = {1},
     .segment_chunks = 2},
};

// For both ops. Every pool has padding, indices out of range, and slots that nobody uses.
inline const std::vector<Config> kPoolConfigs = {
    {.name = "pool: one token, padding by negative indices and by those past the end",
     .B = 6, .T = 1, .H = 2, .HV = 4, .pools = 1, .slots = 9,
     .state_indices = {3, -1, 8, 9, 0, 2147483647}, .in_place = true},
    {.name = "pool: bf16 states, a copy, slots read differ from slots written",
     .B = 4, .T = 5, .H = 1, .HV = 2, .state_dtype = DType::kBF16, .pools = 1, .slots = 8,
     .state_indices = {0, 5, -2147483647, 7}, .output_state_indices = {1, 8, 2, 6}},
    {.name = "pool: fresh sequences, only written",
     .B = 3, .T = 16, .H = 1, .HV = 1, .gate = Gate::kSoftplus, .pools = 1, .slots = 4,
     .output_state_indices = {2, 4, 0}, .in_place = true},
    {.name = "pool: read only",
     .B = 3, .T = 65, .H = 1, .HV = 1, .state = State::kInitial, .pools = 1, .slots = 2,
     .state_indices = {1, 2, 1}},
    {.name = "pool: checkpoints, also where a sequence ends and past the end of the pool",
     .B = 3, .T = 200, .H = 1, .HV = 2, .pools = 1, .slots = 12, .state_indices = {0, -1, 2},
     .output_state_indices = {3, 1, 4}, .checkpoint_indices = {5, 6, -1, 7, 8, 9, 12, 10, 11}},
    {.name = "pool: cut, checkpoints, padding, in place",
     .B = 3, .T = 200, .H = 1, .HV = 2, .segment_chunks = 1, .pools = 1, .slots = 12,
     .state_indices = {0, -1, 2}, .output_state_indices = {3, 1, 4},
     .checkpoint_indices = {5, 6, -1, 7, 8, 9, 12, 10, 11}, .in_place = true},
    {.name = "pool: packed, checkpoints that a sequence is too short for, in place",
     .B = 1, .T = 200, .H = 1, .HV = 1, .state_dtype = DType::kBF16, .offsets_step = 1,
     .offsets = {0, 0, 64, 64, 69, 198}, .pools = 1, .slots = 14,
     .state_indices = {4, 0, 1, 99, 2}, .output_state_indices = {5, 0, -1, 3, 2},
     .checkpoint_indices = {6, 6, 6, 7, 8, 8, 8, 8, 8, 9, 9, 9, 10, 11, 12}, .in_place = true},
    {.name = "two pools, segments with gaps, padding at both ends of a row",
     .B = 2, .T = 140, .H = 1, .HV = 1, .offsets_step = 2,
     .offsets = {3, 70, 75, 140, 140, 140, 0, 20, 64, 128, 130, 139}, .pools = 2, .slots = 5,
     .state_indices = {-1, 0, 1, 3, 0, 5}, .output_state_indices = {2, 4, 5, 1, 2, 3}},
    {.name = "an empty pool", .B = 2, .T = 3, .H = 1, .HV = 1, .pools = 1, .slots = 0,
     .state_indices = {0, -1}},
};

inline const Config kPlanted = {.name = "planted overrun", .B = 1, .T = 130, .H = 1, .HV = 1};

// Sizes that only the CPU runs.
inline const std::vector<Config> kCpuConfigs = {
    {.name = "head sizes of one", .B = 1, .T = 70, .H = 1, .HV = 1, .K = 1, .V = 1,
     .dtype = DType::kF32},
    {.name = "odd head sizes", .B = 2, .T = 67, .H = 1, .HV = 3, .K = 5, .V = 3},
    {.name = "more keys than values, f32", .B = 1, .T = 65, .H = 2, .HV = 2, .K = 255, .V = 17,
     .dtype = DType::kF32, .g_dtype = DType::kF32, .beta_dtype = DType::kF32},
    {.name = "more values than keys", .B = 1, .T = 130, .H = 1, .HV = 1, .K = 33, .V = 256,
     .gate = Gate::kSoftplus},
    {.name = "odd head sizes, packed, f32", .B = 1, .T = 99, .H = 1, .HV = 2, .K = 100, .V = 65,
     .dtype = DType::kF32, .offsets_step = 1, .offsets = {0, 1, 1, 64, 98}},
    {.name = "no tokens", .B = 2, .T = 0, .H = 1, .HV = 1, .K = 7, .V = 9},
    {.name = "odd head sizes, pool, no tokens", .B = 3, .T = 0, .H = 1, .HV = 2, .K = 7, .V = 9,
     .pools = 1, .slots = 4, .state_indices = {3, 4, 0}, .output_state_indices = {1, 0, 2}},
    {.name = "odd head sizes, two pools, checkpoints", .B = 2, .T = 130, .H = 1, .HV = 2, .K = 20,
     .V = 37, .dtype = DType::kF32, .pools = 2, .slots = 6, .state_indices = {0, 5},
     .output_state_indices = {1, 5}, .checkpoint_indices = {2, 3, 0, -1}, .in_place = true},
    {.name = "many chunks, grouped heads", .B = 1, .T = 8200, .H = 1, .HV = 2, .K = 16, .V = 8},
    {.name = "few values, one token", .B = 3, .T = 1, .H = 1, .HV = 1, .K = 256, .V = 6,
     .state_dtype = DType::kBF16},
};
// clang-format on

inline size_t SizeOf(DType dtype) { return dtype == DType::kBF16 ? 2 : 4; }

using Bytes = std::vector<std::byte>;

// One operand each, empty where the call has none.
struct Operands {
  Bytes q, k, v, g, beta, A_log, dt_bias, offsets, initial_state;
  Bytes state_indices, output_state_indices, checkpoint_indices;
};

inline Bytes ToBytes(const std::vector<int32_t>& values) {
  Bytes bytes(values.size() * sizeof(int32_t));
  if (!values.empty()) std::memcpy(bytes.data(), values.data(), bytes.size());
  return bytes;
}

// n numbers mean + deviation * normal, none above `limit`.
inline Bytes Random(int64_t n, DType dtype, std::mt19937* generator, float mean = 0,
                    float deviation = 1, float limit = 1e30f) {
  std::normal_distribution<float> draw(mean, deviation);
  Bytes bytes(n * SizeOf(dtype));
  for (int64_t i = 0; i < n; ++i) {
    const float x = std::fmin(draw(*generator), limit);
    uint32_t word;
    std::memcpy(&word, &x, 4);
    const uint16_t half = static_cast<uint16_t>(word >> 16);  // truncated: still a random number
    const void* bits = dtype == DType::kBF16 ? static_cast<const void*>(&half) : &word;
    std::memcpy(bytes.data() + i * SizeOf(dtype), bits, SizeOf(dtype));
  }
  return bytes;
}

inline Operands MakeOperands(const Config& c) {
  std::mt19937 generator(1234);
  const int64_t tokens = c.B * c.T;
  const bool raw = c.gate != Gate::kActivated;
  const float key = c.l2norm ? 1.0f : 0.09f;
  Operands x;
  x.q = Random(tokens * c.H * c.K, c.dtype, &generator, 0, key);
  x.k = Random(tokens * c.H * c.K, c.dtype, &generator, 0, key);
  x.v = Random(c.values(), c.dtype, &generator);
  x.g = Random(tokens * c.HV * c.K, c.g_dtype, &generator, c.gate_mean, 1, raw ? 1e30f : 0.0f);
  x.beta = c.beta_mode == BetaMode::kProbability
               ? Random(tokens * c.HV, c.beta_dtype, &generator, 0.5f, 0.1f)
               : Random(tokens * c.HV, c.beta_dtype, &generator);
  if (raw && c.biased) {
    x.A_log = Random(c.HV, DType::kF32, &generator);
    x.dt_bias = Random(c.HV * c.K, DType::kF32, &generator);
  }
  x.offsets = ToBytes(c.offsets);
  x.state_indices = ToBytes(c.state_indices);
  x.output_state_indices = ToBytes(c.output_state_indices);
  x.checkpoint_indices = ToBytes(c.checkpoint_indices);
  if (c.has_initial_state()) x.initial_state = Random(c.states(), c.state_dtype, &generator);
  return x;
}

// Everything but the pointers.
inline FwdParams MakeParams(const Config& c) {
  FwdParams p{};
  p.B = c.B;
  p.T = c.T;
  p.H = c.H;
  p.HV = c.HV;
  p.K = c.K;
  p.V = c.V;
  p.M = c.M();
  p.scale = 0.088388f;
  p.lower_bound = c.gate == Gate::kLowerBound ? -5.0f : 0.0f;
  p.gate = c.gate;
  p.beta_mode = c.beta_mode;
  p.l2norm = c.l2norm;
  p.dtype = c.dtype;
  p.g_dtype = c.g_dtype;
  p.beta_dtype = c.beta_dtype;
  p.state_dtype = c.state_dtype;
  p.offsets_step = c.offsets_step;
  p.pools = c.pools;
  p.slots = c.slots;
  p.segment_chunks = c.segment_chunks;
  p.slice_chunks = c.slice_chunks;
  return p;
}

inline float At(const Bytes& bytes, DType dtype, int64_t i) {
  uint32_t word = 0;
  const size_t size = SizeOf(dtype);
  std::memcpy(reinterpret_cast<std::byte*>(&word) + (4 - size), bytes.data() + i * size, size);
  float x;
  std::memcpy(&x, &word, 4);
  return x;
}

inline bool IsMalformed(const Config& c, int64_t row) {
  for (int64_t r : c.malformed_rows) {
    if (r == row) return true;
  }
  return false;
}

// Sequence n of a well-formed row: its tokens, from `begin` to `end` of the row.
struct Span {
  int64_t begin, end;
};

inline Span SpanOf(const Config& c, int64_t n) {
  if (c.offsets_step == 0) return {0, c.T};
  const int64_t row = n / c.M(), m = n % c.M();
  const int32_t* offsets = c.offsets.data() + row * (c.offsets_step == 1 ? c.M() + 1 : 2 * c.M());
  return {offsets[m * c.offsets_step], offsets[m * c.offsets_step + 1]};
}

inline bool IsSlot(const Config& c, int32_t index) { return 0 <= index && index < c.slots; }

inline bool IsPadding(const Config& c, int64_t n) {
  if (c.pools == 0) return false;
  return !IsSlot(c, c.state_indices.empty() ? c.output_state_indices[n] : c.state_indices[n]);
}

// Whether token t of a well-formed row belongs to a sequence that is not padding.
inline bool InSequence(const Config& c, int64_t row, int64_t t) {
  for (int64_t n = row * c.M(); n < (row + 1) * c.M(); ++n) {
    const Span s = SpanOf(c, n);
    if (s.begin <= t && t < s.end) return !IsPadding(c, n);
  }
  return false;
}

// Which slots of all pools a call writes.
inline std::vector<bool> WrittenSlots(const Config& c) {
  std::vector<bool> written(c.pools * c.slots);
  if (c.pools == 0) return written;
  const int64_t N = c.B * c.M(), checkpoints = c.T / kChunk;
  for (int64_t n = 0; n < N; ++n) {
    if (IsPadding(c, n)) continue;
    const auto write = [&, n](int32_t index) {
      if (IsSlot(c, index)) written[n / (N / c.pools) * c.slots + index] = true;
    };
    write(c.output_state_indices.empty() ? c.state_indices[n] : c.output_state_indices[n]);
    if (c.checkpoint_indices.empty()) continue;
    const Span s = SpanOf(c, n);
    for (int64_t j = 0; kChunk * (j + 1) <= s.end - s.begin; ++j) {
      write(c.checkpoint_indices[n * checkpoints + j]);
    }
  }
  return written;
}

// What is wrong with the results of a configuration, or "": all of them finite, but NaN in
// malformed rows and 0 for tokens of no sequence; slots that no sequence writes are those of
// initial_state. `final_state` is empty when there is none.
inline std::string Judge(const Config& c, const Bytes& o, const Bytes& final_state) {
  for (int64_t i = 0; i < c.values(); ++i) {
    const float x = At(o, c.dtype, i);
    const int64_t token = i / (c.HV * c.V), row = token / c.T, t = token % c.T;
    const bool good = IsMalformed(c, row)      ? std::isnan(x)
                      : !InSequence(c, row, t) ? x == 0.0f
                                               : std::isfinite(x);
    if (!good) {
      return "o of row " + std::to_string(row) + ", token " + std::to_string(t) + " is " +
             std::to_string(x);
    }
  }
  if (final_state.empty()) return "";
  const std::vector<bool> written = WrittenSlots(c);
  const Bytes initial_state = c.pools > 0 ? MakeOperands(c).initial_state : Bytes();
  for (int64_t i = 0; i < c.states(); ++i) {
    const float x = At(final_state, c.state_dtype, i);
    const int64_t state = i / (c.HV * c.V * c.K);
    const bool malformed = c.pools == 0 && IsMalformed(c, state / c.M());
    const bool kept = c.pools > 0 && !written[state];
    const bool good = malformed ? std::isnan(x)
                      : kept    ? x == At(initial_state, c.state_dtype, i)
                                : std::isfinite(x);
    if (!good) return "state " + std::to_string(state) + " has " + std::to_string(x);
  }
  return "";
}

}  // namespace jax_kda
