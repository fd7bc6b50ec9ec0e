// Buffers and attributes of one FFI call -> FwdParams or BwdParams, with every check that the host
// can make. Shared by both platforms; Python has checked the same at trace time, with better words.
// Values in device memory are not read here.
//
// Order of checks for each operand: rank, shape, dtype. Messages: "`name` must <rule>; got
// <value>".
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "ffi/common/params.h"
#include "xla/ffi/api/ffi.h"

namespace jax_kda {

namespace ffi = ::xla::ffi;

// The attributes of `kda_chunk_fwd`, `kda_recurrent_fwd` and `kda_chunk_bwd`: plain keyword
// arguments of jax.ffi.ffi_call, of exactly these types.
struct FwdAttrs {
  float scale;
  float lower_bound;  // 0 when the gate has none
  int32_t gate;       // enum Gate
  int32_t beta_mode;  // enum BetaMode
  bool l2norm;
  bool has_A_log;
  bool has_dt_bias;
  bool has_initial_state;
  int32_t offsets_step;  // 0: no offsets; 1: [..., M + 1]; 2: [..., M, 2]
  bool has_final_state;  // whether the state is a result
  bool has_state_indices;
  bool has_output_state_indices;
  bool has_checkpoint_indices;
  int32_t segment_chunks;  // 0: scans are not cut
  int32_t slice_chunks;    // 0: everything is prepared at once
};

// Whether the last result is a u8 workspace.
enum class Workspace { kNone, kLastResult };

// Returned from a function of either type: ffi::Error or ffi::ErrorOr<T>.
struct Failure {
  ffi::Error error;
  operator ffi::Error() && { return std::move(error); }  // NOLINT
  template <class T>
  operator ffi::ErrorOr<T>() && {  // NOLINT
    return ffi::Unexpected<ffi::Error>(std::move(error));
  }
};

inline ffi::Error ErrorOf(ffi::Error error) { return error; }

template <class T>
ffi::Error ErrorOf(const ffi::ErrorOr<T>& value) {
  return value.has_error() ? value.error() : ffi::Error::Success();
}

// The one macro: `expr` is an ffi::Error or an ffi::ErrorOr<T>.
#define RETURN_IF_ERROR(expr)                                                    \
  do {                                                                           \
    if (::xla::ffi::Error error_ = ::jax_kda::ErrorOf(expr); error_.failure()) { \
      return ::jax_kda::Failure{std::move(error_)};                              \
    }                                                                            \
  } while (false)

namespace check {

using Dims = std::vector<int64_t>;

// One operand or result, by the name that users know.
struct Array {
  std::string name;
  Dims dims;
  ffi::DataType dtype = ffi::DataType::INVALID;
  void* data = nullptr;

  int64_t rank() const { return static_cast<int64_t>(dims.size()); }
  int64_t from_end(int64_t i) const { return dims[dims.size() - i]; }  // 1: the last axis
  Dims leading(int64_t trailing) const { return Dims(dims.begin(), dims.end() - trailing); }
};

inline std::string ToString(const Dims& dims) {
  std::ostringstream out;
  out << "[";
  for (size_t i = 0; i < dims.size(); ++i) out << (i ? ", " : "") << dims[i];
  out << "]";
  return out.str();
}

template <class... Words>
ffi::Error Invalid(const Words&... words) {
  std::ostringstream out;
  (out << ... << words);
  return ffi::Error::InvalidArgument(out.str());
}

inline int64_t Product(const Dims& dims) {
  int64_t product = 1;
  for (int64_t d : dims) product *= d;
  return product;
}

inline Dims Concat(Dims a, const Dims& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

inline ffi::Error CheckRank(const Array& x, const char* letters, int64_t rank) {
  if (x.rank() >= rank) return ffi::Error::Success();
  return Invalid("`", x.name, "` must have at least ", rank, " axes ", letters, "; got ",
                 ToString(x.dims));
}

inline ffi::Error CheckShape(const Array& x, const char* letters, const Dims& dims) {
  if (x.dims == dims) return ffi::Error::Success();
  return Invalid("`", x.name, "` must have shape ", letters, " = ", ToString(dims), "; got ",
                 ToString(x.dims));
}

inline ffi::Error CheckDtype(const Array& x, ffi::DataType dtype) {
  if (x.dtype == dtype) return ffi::Error::Success();
  return Invalid("`", x.name, "` must have dtype ", dtype, "; got ", x.dtype);
}

inline ffi::ErrorOr<DType> FloatDtype(const Array& x) {
  if (x.dtype == ffi::DataType::BF16) return DType::kBF16;
  if (x.dtype == ffi::DataType::F32) return DType::kF32;
  return Failure{Invalid("`", x.name, "` must have dtype BF16 or F32; got ", x.dtype)};
}

// Hands out buffers in call order under the names of the contract.
template <class Buffers>
class Cursor {
 public:
  explicit Cursor(const Buffers& buffers) : buffers_(buffers) {}

  ffi::ErrorOr<Array> Next(const char* name) {
    auto buffer = buffers_.template get<ffi::AnyBuffer>(next_);
    if (buffer.has_error()) {
      return Failure{Invalid("`", name, "` must be buffer ", next_, " of the call; got ",
                             buffer.error().message())};
    }
    ++next_;
    return Describe(name, *buffer);
  }

  size_t remaining() const { return buffers_.size() - next_; }

 private:
  static Array Describe(const char* name, ffi::AnyBuffer x) {
    return {name, Dims(x.dimensions().begin(), x.dimensions().end()), x.element_type(),
            x.untyped_data()};
  }
  static Array Describe(const char* name, ffi::Result<ffi::AnyBuffer> x) {
    return Describe(name, *x);
  }

  const Buffers& buffers_;
  size_t next_ = 0;
};

// The sizes, from the operands that carry them, and everything about q, k, v, g and beta.
inline ffi::Error FillTokens(Cursor<ffi::RemainingArgs>& operands, FwdParams& p, Dims& leading) {
  auto q = operands.Next("q");
  RETURN_IF_ERROR(q);
  auto k = operands.Next("k");
  RETURN_IF_ERROR(k);
  auto v = operands.Next("v");
  RETURN_IF_ERROR(v);
  auto g = operands.Next("g");
  RETURN_IF_ERROR(g);
  auto beta = operands.Next("beta");
  RETURN_IF_ERROR(beta);

  RETURN_IF_ERROR(CheckRank(*q, "[..., T, H, K]", 4));
  RETURN_IF_ERROR(CheckRank(*v, "[..., T, HV, V]", 4));
  leading = q->leading(3);
  p.B = Product(leading);
  p.T = q->from_end(3);
  p.H = q->from_end(2);
  p.K = q->from_end(1);
  p.HV = v->from_end(2);
  p.V = v->from_end(1);
  RETURN_IF_ERROR(CheckShape(*k, "[..., T, H, K] of `q`", q->dims));
  RETURN_IF_ERROR(CheckShape(*v, "[..., T, HV, V]", Concat(leading, {p.T, p.HV, p.V})));
  RETURN_IF_ERROR(CheckShape(*g, "[..., T, HV, K]", Concat(leading, {p.T, p.HV, p.K})));
  RETURN_IF_ERROR(CheckShape(*beta, "[..., T, HV]", Concat(leading, {p.T, p.HV})));
  if (p.H < 1 || p.HV < 1 || p.HV % p.H != 0) {
    return Invalid("`v` must have a positive multiple of H = ", p.H, " heads; got ", p.HV);
  }
  if (p.K < 1 || p.V < 1) {
    return Invalid("`q` and `v` must have head sizes K, V of at least 1; got ", p.K, ", ", p.V);
  }

  auto dtype = FloatDtype(*q);
  RETURN_IF_ERROR(dtype);
  RETURN_IF_ERROR(CheckDtype(*k, q->dtype));
  RETURN_IF_ERROR(CheckDtype(*v, q->dtype));
  auto g_dtype = FloatDtype(*g);
  RETURN_IF_ERROR(g_dtype);
  auto beta_dtype = FloatDtype(*beta);
  RETURN_IF_ERROR(beta_dtype);
  p.dtype = *dtype;
  p.g_dtype = *g_dtype;
  p.beta_dtype = *beta_dtype;
  p.q = q->data;
  p.k = k->data;
  p.v = v->data;
  p.g = g->data;
  p.beta = beta->data;
  return ffi::Error::Success();
}

// A float32 parameter of the gate: shape `own`, shared by all rows, or one for each row of tokens.
inline ffi::Error FillGateParam(Cursor<ffi::RemainingArgs>& operands, const char* name,
                                const char* letters, const Dims& leading, const Dims& own,
                                const float*& data, int64_t& stride) {
  auto x = operands.Next(name);
  RETURN_IF_ERROR(x);
  const bool per_row = x->rank() > static_cast<int64_t>(own.size());
  RETURN_IF_ERROR(CheckShape(*x, letters, per_row ? Concat(leading, own) : own));
  RETURN_IF_ERROR(CheckDtype(*x, ffi::DataType::F32));
  data = static_cast<const float*>(x->data);
  stride = per_row ? Product(own) : 0;
  return ffi::Error::Success();
}

inline ffi::Error FillOffsets(Cursor<ffi::RemainingArgs>& operands, int32_t step, FwdParams& p) {
  const char* letters = step == 1 ? "[..., M + 1]" : "[..., M, 2]";
  auto x = operands.Next("offsets");
  RETURN_IF_ERROR(x);
  RETURN_IF_ERROR(CheckRank(*x, letters, step));
  const bool pairs = step == 2;
  if (Product(x->leading(step)) != p.B || (pairs ? x->from_end(1) != 2 : x->from_end(1) < 1)) {
    return Invalid("`offsets` must have shape ", letters, " with ", p.B, " rows; got ",
                   ToString(x->dims));
  }
  RETURN_IF_ERROR(CheckDtype(*x, ffi::DataType::S32));
  p.M = pairs ? x->from_end(2) : x->from_end(1) - 1;
  p.offsets = static_cast<const int32_t*>(x->data);
  return ffi::Error::Success();
}

// A pool: [..., slots, HV, V, K].
inline ffi::Error CheckPool(const Array& x, const FwdParams& p) {
  RETURN_IF_ERROR(CheckRank(x, "[..., slots, HV, V, K]", 4));
  if (x.from_end(3) != p.HV || x.from_end(2) != p.V || x.from_end(1) != p.K ||
      Product(x.leading(4)) != p.pools || x.from_end(4) != p.slots) {
    return Invalid("`", x.name, "` must have shape [..., slots, HV, V, K] = ",
                   ToString({p.pools, p.slots, p.HV, p.V, p.K}), "; got ", ToString(x.dims));
  }
  return ffi::Error::Success();
}

inline ffi::Error CheckState(const Array& x, const FwdParams& p) {
  if (p.pools > 0) return CheckPool(x, p);
  RETURN_IF_ERROR(CheckRank(x, "[..., N, HV, V, K]", 4));
  if (x.from_end(3) != p.HV || x.from_end(2) != p.V || x.from_end(1) != p.K ||
      Product(x.leading(3)) != p.B * p.M) {
    return Invalid("`", x.name,
                   "` must have shape [..., N, HV, V, K] = ", ToString({p.B * p.M, p.HV, p.V, p.K}),
                   "; got ", ToString(x.dims));
  }
  return ffi::Error::Success();
}

// Slots of a pool, by sequence and, for checkpoints, by chunk: [..., N] or [..., N, T / 64].
inline ffi::Error FillIndices(Cursor<ffi::RemainingArgs>& operands, const char* name,
                              bool checkpoints, const Dims& pool_axes, const FwdParams& p,
                              const int32_t*& data) {
  const char* letters = checkpoints ? "[..., N, T / 64]" : "[..., N]";
  auto x = operands.Next(name);
  RETURN_IF_ERROR(x);
  Dims dims = Concat(pool_axes, {p.B * p.M / std::max<int64_t>(p.pools, 1)});
  if (checkpoints) dims.push_back(p.T / kChunk);
  RETURN_IF_ERROR(CheckShape(*x, letters, dims));
  RETURN_IF_ERROR(CheckDtype(*x, ffi::DataType::S32));
  data = static_cast<const int32_t*>(x->data);
  return ffi::Error::Success();
}

// Everything up to the states: options, tokens, parameters of the gate and offsets.
inline ffi::Error FillInputs(const FwdAttrs& attrs, Cursor<ffi::RemainingArgs>& operands,
                             FwdParams& p, Dims& leading) {
  if (attrs.gate < 0 || attrs.gate > 2) {
    return Invalid("`gate` must be 0, 1 or 2; got ", attrs.gate);
  }
  if (attrs.beta_mode < 0 || attrs.beta_mode > 2) {
    return Invalid("`beta_mode` must be 0, 1 or 2; got ", attrs.beta_mode);
  }
  if (attrs.offsets_step < 0 || attrs.offsets_step > 2) {
    return Invalid("`offsets_step` must be 0, 1 or 2; got ", attrs.offsets_step);
  }
  if (attrs.segment_chunks < 0) {
    return Invalid("`segment_chunks` must not be negative; got ", attrs.segment_chunks);
  }
  if (attrs.slice_chunks < 0) {
    return Invalid("`slice_chunks` must not be negative; got ", attrs.slice_chunks);
  }
  if (attrs.slice_chunks > 0 && (attrs.segment_chunks > 0 || attrs.offsets_step > 0)) {
    return Invalid("`slice_chunks` must be 0 with segments or offsets; got ", attrs.slice_chunks);
  }
  p.segment_chunks = attrs.segment_chunks;
  p.slice_chunks = attrs.slice_chunks;
  p.scale = attrs.scale;
  p.lower_bound = attrs.lower_bound;
  p.gate = static_cast<Gate>(attrs.gate);
  p.beta_mode = static_cast<BetaMode>(attrs.beta_mode);
  p.l2norm = attrs.l2norm;
  p.M = 1;
  p.offsets_step = attrs.offsets_step;
  p.state_dtype = DType::kF32;
  // Written so that NaN fails; every exponent of the kernels is at most 0 because of this.
  if (p.gate == Gate::kLowerBound && !(p.lower_bound >= -5.0f && p.lower_bound < 0.0f)) {
    return Invalid("`lower_bound` must be in [-5, 0); got ", p.lower_bound);
  }

  RETURN_IF_ERROR(FillTokens(operands, p, leading));
  if (attrs.has_A_log) {
    RETURN_IF_ERROR(FillGateParam(operands, "A_log", "[HV] or [..., HV]", leading, {p.HV}, p.A_log,
                                  p.A_log_stride));
  }
  if (attrs.has_dt_bias) {
    RETURN_IF_ERROR(FillGateParam(operands, "dt_bias", "[HV, K] or [..., HV, K]", leading,
                                  {p.HV, p.K}, p.dt_bias, p.dt_bias_stride));
  }
  if (attrs.offsets_step != 0) RETURN_IF_ERROR(FillOffsets(operands, attrs.offsets_step, p));
  return ffi::Error::Success();
}

inline ffi::Error FillWorkspace(Cursor<ffi::RemainingRets>& results, FwdParams& p) {
  auto bytes = results.Next("workspace");
  RETURN_IF_ERROR(bytes);
  if (bytes->rank() != 1) {
    return Invalid("`workspace` must have shape [bytes]; got ", ToString(bytes->dims));
  }
  RETURN_IF_ERROR(CheckDtype(*bytes, ffi::DataType::U8));
  p.workspace = static_cast<std::byte*>(bytes->data);
  p.workspace_bytes = bytes->dims[0];
  return ffi::Error::Success();
}

inline ffi::Error FillResults(const ffi::RemainingRets& rets, bool has_final_state,
                              Workspace workspace, const Dims& leading, FwdParams& p) {
  Cursor<ffi::RemainingRets> results(rets);
  auto o = results.Next("o");
  RETURN_IF_ERROR(o);
  RETURN_IF_ERROR(CheckShape(*o, "[..., T, HV, V]", Concat(leading, {p.T, p.HV, p.V})));
  RETURN_IF_ERROR(
      CheckDtype(*o, p.dtype == DType::kBF16 ? ffi::DataType::BF16 : ffi::DataType::F32));
  p.o = o->data;

  if (has_final_state) {
    auto final_state = results.Next("final_state");
    RETURN_IF_ERROR(final_state);
    RETURN_IF_ERROR(CheckState(*final_state, p));
    auto dtype = FloatDtype(*final_state);
    RETURN_IF_ERROR(dtype);
    if (p.initial_state != nullptr && *dtype != p.state_dtype) {
      return Invalid("`final_state` must have the dtype of `initial_state`; got ",
                     final_state->dtype);
    }
    p.state_dtype = *dtype;
    p.final_state = final_state->data;
  }

  if (workspace == Workspace::kLastResult) RETURN_IF_ERROR(FillWorkspace(results, p));
  if (results.remaining() != 0) {
    return Invalid("the call must have no result after the last one of the contract; got ",
                   results.remaining(), " more");
  }
  return ffi::Error::Success();
}

}  // namespace check

// args: q k v g beta [A_log] [dt_bias] [offsets] [initial_state] [state_indices]
// [output_state_indices] [checkpoint_indices], then up to two operands aliased to results, never
// read. rets: o [final_state] [workspace]. Pointers of empty buffers may be null.
inline ffi::ErrorOr<FwdParams> MakeFwdParams(const FwdAttrs& attrs, const ffi::RemainingArgs& args,
                                             const ffi::RemainingRets& rets, Workspace workspace) {
  using check::Invalid;
  FwdParams p{};
  check::Dims leading, pool_axes;
  check::Cursor<ffi::RemainingArgs> operands(args);
  const bool pooled = attrs.has_state_indices || attrs.has_output_state_indices;
  if (attrs.has_checkpoint_indices && !(pooled && attrs.has_final_state)) {
    return Failure{
        Invalid("`checkpoint_indices` must come with indices of a pool and with a final "
                "state; got ",
                pooled ? "no final state" : "no pool")};
  }
  RETURN_IF_ERROR(check::FillInputs(attrs, operands, p, leading));
  if (attrs.has_initial_state) {
    auto state = operands.Next("initial_state");
    RETURN_IF_ERROR(state);
    if (pooled) {
      RETURN_IF_ERROR(check::CheckRank(*state, "[..., slots, HV, V, K]", 4));
      pool_axes = state->leading(4);
      p.pools = check::Product(pool_axes);
      p.slots = state->from_end(4);
      if (p.pools < 1 || p.B * p.M % p.pools != 0) {
        return Failure{Invalid("`initial_state` must have leading axes that divide the ", p.B * p.M,
                               " sequences; got ", check::ToString(state->dims))};
      }
    }
    RETURN_IF_ERROR(check::CheckState(*state, p));
    auto dtype = check::FloatDtype(*state);
    RETURN_IF_ERROR(dtype);
    p.state_dtype = *dtype;
    p.initial_state = state->data;
  } else if (pooled) {
    return Failure{Invalid("`initial_state` must be the pool that indices select from; got none")};
  }
  if (attrs.has_state_indices) {
    RETURN_IF_ERROR(
        check::FillIndices(operands, "state_indices", false, pool_axes, p, p.state_indices));
  }
  if (attrs.has_output_state_indices) {
    RETURN_IF_ERROR(check::FillIndices(operands, "output_state_indices", false, pool_axes, p,
                                       p.output_state_indices));
  }
  if (attrs.has_checkpoint_indices) {
    RETURN_IF_ERROR(check::FillIndices(operands, "checkpoint_indices", true, pool_axes, p,
                                       p.checkpoint_indices));
  }
  if (operands.remaining() > 2) {
    return Failure{
        Invalid("the call must have at most 2 operands after those of the contract; got ",
                operands.remaining())};
  }
  RETURN_IF_ERROR(check::FillResults(rets, attrs.has_final_state, workspace, leading, p));
  return p;
}

namespace check {

// A result of kda_chunk_bwd.
inline ffi::Error FillGradient(Cursor<ffi::RemainingRets>& results, const char* name,
                               const char* letters, const Dims& dims, DType dtype, void*& data) {
  auto x = results.Next(name);
  RETURN_IF_ERROR(x);
  RETURN_IF_ERROR(CheckShape(*x, letters, dims));
  RETURN_IF_ERROR(CheckDtype(*x, dtype == DType::kBF16 ? ffi::DataType::BF16 : ffi::DataType::F32));
  data = x->data;
  return ffi::Error::Success();
}

}  // namespace check

// args: q k v g beta [A_log] [dt_bias] [offsets] [initial_state] do [dfinal_state], the last where
// has_final_state. rets: dq dk dv dg dbeta [dA_log] [ddt_bias] [dinitial_state] [workspace], each
// like its primal; but dA_log [..., HV] and ddt_bias [..., HV, K] always have one for each row of
// tokens, which the caller sums where the parameter is shared: sharded rows then need no sum in
// here.
inline ffi::ErrorOr<BwdParams> MakeBwdParams(const FwdAttrs& attrs, const ffi::RemainingArgs& args,
                                             const ffi::RemainingRets& rets, Workspace workspace) {
  using check::Concat;
  using check::Invalid;
  BwdParams b{};
  FwdParams& p = b.fwd;
  check::Dims leading, state_dims;
  check::Cursor<ffi::RemainingArgs> operands(args);
  if (attrs.has_state_indices || attrs.has_output_state_indices || attrs.has_checkpoint_indices) {
    return Failure{
        Invalid("`state_indices`, `output_state_indices` and `checkpoint_indices` must "
                "not be given: there is no gradient kernel for pools")};
  }
  RETURN_IF_ERROR(check::FillInputs(attrs, operands, p, leading));
  if (attrs.has_initial_state) {
    auto state = operands.Next("initial_state");
    RETURN_IF_ERROR(state);
    RETURN_IF_ERROR(check::CheckState(*state, p));
    auto dtype = check::FloatDtype(*state);
    RETURN_IF_ERROR(dtype);
    p.state_dtype = *dtype;
    p.initial_state = state->data;
    state_dims = state->dims;
  }
  auto do_ = operands.Next("do");
  RETURN_IF_ERROR(do_);
  RETURN_IF_ERROR(check::CheckShape(*do_, "[..., T, HV, V]", Concat(leading, {p.T, p.HV, p.V})));
  RETURN_IF_ERROR(
      check::CheckDtype(*do_, p.dtype == DType::kBF16 ? ffi::DataType::BF16 : ffi::DataType::F32));
  b.do_ = do_->data;
  b.dfinal_state_dtype = DType::kF32;
  if (attrs.has_final_state) {
    auto dfinal_state = operands.Next("dfinal_state");
    RETURN_IF_ERROR(dfinal_state);
    RETURN_IF_ERROR(check::CheckState(*dfinal_state, p));
    auto dtype = check::FloatDtype(*dfinal_state);
    RETURN_IF_ERROR(dtype);
    b.dfinal_state_dtype = *dtype;
    b.dfinal_state = dfinal_state->data;
  }
  if (operands.remaining() != 0) {
    return Failure{Invalid("the call must have no operand after the last one of the contract; got ",
                           operands.remaining(), " more")};
  }

  check::Cursor<ffi::RemainingRets> results(rets);
  const check::Dims q_dims = Concat(leading, {p.T, p.H, p.K});
  RETURN_IF_ERROR(
      check::FillGradient(results, "dq", "[..., T, H, K] of `q`", q_dims, p.dtype, b.dq));
  RETURN_IF_ERROR(
      check::FillGradient(results, "dk", "[..., T, H, K] of `q`", q_dims, p.dtype, b.dk));
  RETURN_IF_ERROR(check::FillGradient(results, "dv", "[..., T, HV, V]",
                                      Concat(leading, {p.T, p.HV, p.V}), p.dtype, b.dv));
  RETURN_IF_ERROR(check::FillGradient(results, "dg", "[..., T, HV, K]",
                                      Concat(leading, {p.T, p.HV, p.K}), p.g_dtype, b.dg));
  RETURN_IF_ERROR(check::FillGradient(results, "dbeta", "[..., T, HV]",
                                      Concat(leading, {p.T, p.HV}), p.beta_dtype, b.dbeta));
  void* parameter = nullptr;
  if (attrs.has_A_log) {
    RETURN_IF_ERROR(check::FillGradient(results, "dA_log", "[..., HV]", Concat(leading, {p.HV}),
                                        DType::kF32, parameter));
    b.dA_log = static_cast<float*>(parameter);
  }
  if (attrs.has_dt_bias) {
    RETURN_IF_ERROR(check::FillGradient(results, "ddt_bias", "[..., HV, K]",
                                        Concat(leading, {p.HV, p.K}), DType::kF32, parameter));
    b.ddt_bias = static_cast<float*>(parameter);
  }
  if (attrs.has_initial_state) {
    RETURN_IF_ERROR(check::FillGradient(results, "dinitial_state", "[..., N, HV, V, K]", state_dims,
                                        p.state_dtype, b.dinitial_state));
  }
  if (workspace == Workspace::kLastResult) RETURN_IF_ERROR(check::FillWorkspace(results, p));
  if (results.remaining() != 0) {
    return Failure{Invalid("the call must have no result after the last one of the contract; got ",
                           results.remaining(), " more")};
  }
  return b;
}

}  // namespace jax_kda

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(
    jax_kda::FwdAttrs, StructMember<float>("scale"), StructMember<float>("lower_bound"),
    StructMember<int32_t>("gate"), StructMember<int32_t>("beta_mode"), StructMember<bool>("l2norm"),
    StructMember<bool>("has_A_log"), StructMember<bool>("has_dt_bias"),
    StructMember<bool>("has_initial_state"), StructMember<int32_t>("offsets_step"),
    StructMember<bool>("has_final_state"), StructMember<bool>("has_state_indices"),
    StructMember<bool>("has_output_state_indices"), StructMember<bool>("has_checkpoint_indices"),
    StructMember<int32_t>("segment_chunks"), StructMember<int32_t>("slice_chunks"));
