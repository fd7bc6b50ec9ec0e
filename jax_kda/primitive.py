"""How JAX runs the ops: XLA FFI calls into the compiled kernels, and what transforms do with them.

`kda_chunk_fwd` and `kda_recurrent_fwd` are one function of the same operands, by two kernels, each
under one target name on both platforms; `kda_chunk_bwd` is the gradient of both. The layers of
`fwd`, outermost first:

    jit                  eager calls are partitioned too; one trace per shape and `Signature`
    checkpoint_name      of every operand and result, for policies of jax.checkpoint
    auto_axes, pcast     inside, explicit mesh axes are automatic and all operands vary alike
    custom_vjp           keeps the operands; the gradient is a call of its own, in layers like these
                         from here on, and the reference's where it is differentiated again
    custom_vmap          vmap prepends an axis, nothing else
    custom_partitioning  rows and heads shard, with a pool heads alone; everything else is whole
    platform_dependent   the kernel where there is one, else the reference; chosen at lowering
    ffi_call             out and state are aliased operands: a donated buffer is written in place

A buffer that is aliased must never be reshaped, transposed or sliced on the way to the call: on the
CPU, XLA then copies it twice. Leading axes go to the handler as they are, and C++ collapses them.
"""

import functools
import importlib
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.custom_batching import custom_vmap
from jax.custom_derivatives import SymbolicZero
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from . import hopper, reference

# ---- The compiled modules ----------------------------------------------------------------------

# For jax.export: DisabledSafetyCheck.custom_call(target) for each of these.
FFI_TARGETS = ("kda_chunk_fwd", "kda_recurrent_fwd", "kda_chunk_bwd")


def _load(name: str, platform: str) -> ModuleType | None:
    """Registers the handlers of a compiled module, None if there is none. Starts no backend."""
    try:
        module = importlib.import_module(f"{__package__}.{name}")
    except ModuleNotFoundError:
        return None
    # A handler built with newer headers than the runtime's registers without a word, and then no
    # backend starts.
    header = Path(jax.ffi.include_dir(), "xla/ffi/api/c_api.h").read_text()
    runtime = tuple(map(int, re.findall(r"#define XLA_FFI_API_(?:MAJOR|MINOR) (\d+)", header)))
    if module.api_version() > runtime:
        built, runtime = (".".join(map(str, v)) for v in (module.api_version(), runtime))
        raise ImportError(
            f"jax_kda.{name} was built for XLA FFI API {built}, but jax {jax.__version__} has "
            f"{runtime}: upgrade jax, or reinstall jax_kda with pip's build isolation"
        )
    for target, capsule in module.handlers().items():
        jax.ffi.register_ffi_target(target, capsule, platform=platform)
    return module


_cpu = _load("_cpu", "cpu")
_cuda = _load("_cuda", "CUDA")
_built = {p: set(m.handlers()) for p, m in (("cpu", _cpu), ("cuda", _cuda)) if m is not None}
if _cpu is None:
    raise ImportError(
        f"jax_kda in {Path(__file__).parent} is not compiled: run `pip install -e .` in its clone, "
        "or start Python elsewhere to import an installed one"
    )


def handlers() -> dict[str, dict[str, list[str]]]:
    """The compiled handlers of this installation, and the devices of this machine they run on.

    For example `{"kda_chunk_fwd": {"cpu": ["cpu"], "cuda": ["NVIDIA H200"]}}`. A platform that the
    package was built without is missing; its list is empty where there is no device that the
    handler supports. Starts JAX's backends.
    """

    def runs_on(target: str, device: Any) -> bool:
        if device.platform == "cpu":
            return True
        major, minor = map(int, device.compute_capability.split("."))
        return major >= 8 if target == "kda_recurrent_fwd" else (major, minor) == (9, 0)

    def device_kinds(target: str, platform: str) -> list[str]:
        try:
            devices = jax.local_devices(backend=platform)
        except RuntimeError:  # JAX has no such backend here
            return []
        return sorted({d.device_kind for d in devices if runs_on(target, d)})

    return {t: {p: device_kinds(t, p) for p in _built if t in _built[p]} for t in FFI_TARGETS}


def cuda_supports(target: str, dtype: Any, K: int, V: int) -> bool:
    """Whether the CUDA handler runs q, k, v of this dtype and these head sizes."""
    if target == "kda_recurrent_fwd":
        return dtype in (jnp.bfloat16, jnp.float32) and K in (64, 128, 256) and 1 <= V <= 256
    sizes = {128} if target == "kda_chunk_bwd" else {64, 128}
    return bool(dtype == jnp.bfloat16 and {K, V} <= sizes)


# ---- One call -----------------------------------------------------------------------------------


class Config(NamedTuple):
    """The static options of a call."""

    op: str  # "chunk" or "recurrent"
    state_name: str  # what its caller calls `initial_state`
    scale: float
    lower_bound: float | None
    gate: str  # "activated", "softplus" or "lower_bound"
    beta_mode: str  # "probability", "sigmoid" or "two_sigmoid"
    l2norm: bool
    output_final_state: bool
    implementation: str | None  # None, "ffi" or "reference"
    differentiable: bool = True


class Signature(NamedTuple):
    """What is static about a call, besides types. Transforms take arrays only and close over it."""

    config: Config
    names: tuple[str, ...]  # of the operands, in the order of the FFI call
    offsets_step: int  # 0: no offsets, 1: [..., M + 1], 2: [..., M, 2]; under vmap ranks can't tell

    @property
    def target(self) -> str:
        return "kda_chunk_bwd" if self.is_gradient else f"kda_{self.config.op}_fwd"

    @property
    def is_gradient(self) -> bool:
        """Whether cotangents of the results are operands, and those of the operands results."""
        return "do" in self.names

    @property
    def pooled(self) -> bool:
        """Whether `initial_state` is a pool [..., slots, HV, V, K]."""
        return not _INDICES.isdisjoint(self.names)

    def named(self, operands: Sequence[Any]) -> dict[str, Any]:
        return dict(zip(self.names, operands, strict=True))


# Written and never read. They are operands so that results can be aliased to them.
_BUFFERS = ("out", "final_state")
_INDICES = {"state_indices", "output_state_indices", "checkpoint_indices"}
# Parameters of the gate, and how many axes they have where all rows share them.
_GATE_PARAMETERS = {"A_log": 1, "dt_bias": 2}
_GATES = {"activated": 0, "softplus": 1, "lower_bound": 2}
_BETA_MODES = {"probability": 0, "sigmoid": 1, "two_sigmoid": 2}


def _attributes(sig: Signature, segment_chunks: int = 0, slice_chunks: int = 0) -> dict[str, Any]:
    """Attributes of exactly the types that C++ declares: a Python float would arrive as f64."""
    config = sig.config
    return dict(
        scale=np.float32(config.scale),
        lower_bound=np.float32(config.lower_bound or 0.0),
        gate=np.int32(_GATES[config.gate]),
        beta_mode=np.int32(_BETA_MODES[config.beta_mode]),
        l2norm=np.bool_(config.l2norm),
        has_A_log=np.bool_("A_log" in sig.names),
        has_dt_bias=np.bool_("dt_bias" in sig.names),
        has_initial_state=np.bool_("initial_state" in sig.names),
        offsets_step=np.int32(sig.offsets_step),
        has_final_state=np.bool_(config.output_final_state),
        has_state_indices=np.bool_("state_indices" in sig.names),
        has_output_state_indices=np.bool_("output_state_indices" in sig.names),
        has_checkpoint_indices=np.bool_("checkpoint_indices" in sig.names),
        segment_chunks=np.int32(segment_chunks),
        slice_chunks=np.int32(slice_chunks),
    )


def _sequences(sig: Signature, x: dict[str, Any]) -> Any:
    """M, the number of sequences a row."""
    if sig.offsets_step == 0:
        return 1
    return x["offsets"].shape[-1] - 1 if sig.offsets_step == 1 else x["offsets"].shape[-2]


def _type_like(o: Any, shape: Sequence[Any], dtype: Any) -> jax.ShapeDtypeStruct:
    """A type that varies over the manual mesh axes that o varies over."""
    sharding, varies = NamedSharding(o.sharding.mesh, P()), o.manual_axis_type
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding, manual_axis_type=varies)


def _result_types(sig: Signature, x: dict[str, Any]) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Types of o and, if wanted, the final state."""
    o = jax.typeof(x.get("out", x["v"]))
    if not sig.config.output_final_state:
        return (o,)
    if (state := x.get("final_state", x.get("initial_state"))) is not None:
        return o, jax.typeof(state)
    *rows, _, HV, V = o.shape
    shape = (*rows[:-1], rows[-1] * _sequences(sig, x), HV, V, x["q"].shape[-1])
    return o, _type_like(o, shape, jnp.float32)


def _gradient_types(sig: Signature, x: dict[str, Any]) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Types of the gradients: those of the operands, but of gate parameters one for each row."""
    v = jax.typeof(x["v"])

    def type_of(name: str) -> jax.ShapeDtypeStruct:
        own = _GATE_PARAMETERS.get(name)
        shape = x[name].shape if own is None else (*v.shape[:-3], *x[name].shape[-own:])
        return _type_like(v, shape, x[name].dtype)

    return tuple(type_of(name.removeprefix("d")) for name in _results(sig))


def _ffi_call(sig: Signature, platform: str, *operands: jax.Array) -> tuple[jax.Array, ...]:
    x = sig.named(operands)
    results = _gradient_types(sig, x) if sig.is_gradient else _result_types(sig, x)
    aliases = {sig.names.index("out"): 0} if "out" in x else {}
    states = set() if sig.is_gradient else x.keys() & {"initial_state", "final_state"}
    if sig.config.output_final_state and states:
        # One operand at most: "final_state" comes after "initial_state" in the call, and wins.
        aliases[max(map(sig.names.index, states))] = 1
    workspace, attributes = (), _attributes(sig)
    if platform == "cuda" and (sig.is_gradient or sig.config.op == "chunk"):
        # A result that XLA plans: handlers can't allocate inside a CUDA graph.
        *rows, T, H, _ = x["q"].shape
        B, HV, M = math.prod(rows), x["v"].shape[-2], _sequences(sig, x)
        packed = sig.offsets_step != 0
        sizes = (B, T, HV, M, packed)
        if sig.is_gradient:
            attributes = _attributes(sig, hopper.gradient_segment_chunks(*sizes))
            nbytes = hopper.chunk_bwd_workspace_bytes(B, T, H, HV, M, packed)
        else:
            attributes = _attributes(
                sig, hopper.segment_chunks(*sizes), hopper.slice_chunks(*sizes)
            )
            nbytes = hopper.chunk_fwd_workspace_bytes(*sizes)
        workspace = (_type_like(results[0], (nbytes,), jnp.uint8),)
    types = (*results, *workspace)
    call = jax.ffi.ffi_call(sig.target, types, input_output_aliases=aliases)
    return tuple(call(*operands, **attributes))[: len(results)]


def _reference(sig: Signature, x: dict[str, jax.Array]) -> tuple[jax.Array, ...]:
    options = sig.config._asdict()
    for name in ("op", "state_name", "implementation", "differentiable"):
        del options[name]
    inputs = {name: value for name, value in x.items() if name not in _BUFFERS}
    o, state = reference.chunk_fwd(**inputs, **options)
    if state is None:
        return (o,)
    return o, state.astype(x["final_state"].dtype) if "final_state" in x else state


def _cotangents(f: Callable, inputs: dict[str, jax.Array], cotangents: Any) -> dict[str, Any]:
    """Cotangents of the inputs of f, a function of arrays by name, but for integers."""
    fixed = {name: inputs[name] for name in ("offsets", *_INDICES) if name in inputs}
    inputs = {name: a for name, a in inputs.items() if name not in fixed}
    _, vjp = jax.vjp(lambda inputs: f(inputs | fixed), inputs)
    return vjp(cotangents)[0]


def _reference_gradient(sig: Signature, x: dict[str, jax.Array]) -> tuple[jax.Array, ...]:
    rows = x["v"].shape[:-3]

    def each_row(name: str, a: jax.Array) -> jax.Array:
        return jnp.broadcast_to(a, (*rows, *a.shape)) if a.ndim == _GATE_PARAMETERS[name] else a

    x = x | {name: each_row(name, x[name]) for name in _GATE_PARAMETERS if name in x}
    cotangents = tuple(x.pop(name) for name in ("do", "dfinal_state") if name in x)
    primal = sig._replace(names=tuple(x))
    gradients = _cotangents(functools.partial(_reference, primal), x, cotangents)
    return tuple(gradients[name.removeprefix("d")] for name in _results(sig))


def _call(sig: Signature, *operands: jax.Array) -> tuple[jax.Array, ...]:
    """The kernel or the reference, whichever runs on the platform this is lowered for."""
    x = sig.named(operands)
    kernels = {
        platform: functools.partial(_ffi_call, sig, platform) for platform in ("cpu", "cuda")
    }
    if sig.config.implementation == "ffi" and not sig.is_gradient:
        return jax.lax.platform_dependent(*operands, **kernels)
    K, V = x["q"].shape[-1], x["v"].shape[-1]
    # The recurrence runs on GPUs that the gradient's kernel does not: its gradient has to as well.
    lacks_gradient = sig.is_gradient and sig.config.op != "chunk"
    if lacks_gradient or not cuda_supports(sig.target, x["q"].dtype, K, V):
        del kernels["cuda"]
    kernels = {p: f for p, f in kernels.items() if sig.target in _built.get(p, ())}
    reference = _reference_gradient if sig.is_gradient else _reference
    plain = lambda *operands: reference(sig, sig.named(operands))
    return jax.lax.platform_dependent(*operands, default=plain, **kernels)


# ---- Sharding -----------------------------------------------------------------------------------


def _axes(sig: Signature, x: dict[str, Any]) -> dict[str, tuple[str, ...]]:
    """The axes by name, of operands and results. Rows of tokens are counted by axes b0, b1, ..."""
    rows = tuple(f"b{i}" for i in range(len(x["q"].shape) - 3))
    # A state has the sequences of all rows where tokens have the last of these axes.
    sequences = {0: rows, 1: (*rows[:-1], "n"), 2: (*rows[:-1], "bm")}[sig.offsets_step]
    states = (*rows[:-1], "slots") if sig.pooled else sequences

    def gate_parameter(name: str, *own: str) -> tuple[str, ...]:
        return own if name not in x or len(x[name].shape) == len(own) else (*rows, *own)

    q, v, state = (*rows, "t", "h", "k"), (*rows, "t", "hv", "v"), (*states, "hv", "v", "k")
    g, beta = (*rows, "t", "hv", "k"), (*rows, "t", "hv")
    return dict(
        q=q,
        k=q,
        v=v,
        g=g,
        beta=beta,
        A_log=gate_parameter("A_log", "hv"),
        dt_bias=gate_parameter("dt_bias", "hv", "k"),
        offsets=(*rows[:-1], "n1") if sig.offsets_step == 1 else (*rows, "m", "pair"),
        initial_state=state,
        state_indices=sequences,
        output_state_indices=sequences,
        checkpoint_indices=(*sequences, "checkpoint"),
        out=v,
        final_state=state,
        o=v,
        do=v,
        dfinal_state=state,
        dq=q,
        dk=q,
        dv=v,
        dg=g,
        dbeta=beta,
        dA_log=(*rows, "hv"),
        ddt_bias=(*rows, "hv", "k"),
        dinitial_state=state,
    )


def _results(sig: Signature) -> tuple[str, ...]:
    if sig.is_gradient:
        return tuple(f"d{n}" for n in sig.names if n not in ("offsets", "do", "dfinal_state"))
    return ("o", "final_state") if sig.config.output_final_state else ("o",)


def _sharding_rule(sig: Signature, mesh: Mesh, operands: Sequence[Any], results: Sequence[Any]):
    """Which axes shard together, for Shardy to propagate: an einsum over the names of `_axes`."""
    del mesh, results
    x = sig.named(operands)
    axes = _axes(sig, x)
    H, HV = x["q"].shape[-2], x["v"].shape[-2]
    last, B, M = axes["q"][-4], x["q"].shape[-4], _sequences(sig, x)
    # A compound factor may not have a part of size 1.
    heads = {"h": "h", "hv": "h" if H == HV else "hv" if H == 1 else "(h r)"}
    states = {"bm": last if M == 1 else "m" if B == 1 else f"({last} m)"}
    sizes = {"r": HV // H} if heads["hv"] == "(h r)" else {}
    factor = lambda name: " ".join((heads | states).get(axis, axis) for axis in axes[name])
    rule = f"{', '.join(map(factor, sig.names))} -> {', '.join(map(factor, _results(sig)))}"
    return rule, sizes


def _partition(sig: Signature, mesh: Mesh, operands: Sequence[Any], results: Sequence[Any]):
    """Forces o's (or dv's) sharding of rows and heads on all, and everything else whole.

    Where an axis is left sharded that must not be, the numbers are wrong. Heads shard only into as
    many parts as q's can: every device must see the true ratio of HV to H. All rows use one pool,
    so that they are whole with one; and a pool is never gathered.
    """
    x = sig.named(operands)
    axes = _axes(sig, x)
    rows = axes["q"][:-3]
    H = x["q"].shape[-2]
    spec = results[_results(sig).index("dv" if sig.is_gradient else "o")].sharding.spec
    spec = dict(zip(axes["o"], (*spec, *[None] * (len(axes["o"]) - len(spec))), strict=True))

    def shard(axis: str, size: int) -> Any:  # o's axes of the mesh, if they divide the size
        return spec[axis] if size % _parts(mesh, spec[axis]) == 0 else None

    shards = dict(zip(rows, map(shard, rows, x["q"].shape), strict=False))
    if sig.pooled:
        _check_pool(sig, x["initial_state"])
        shards[rows[-1]] = None
    shards["bm"] = shards[rows[-1]]  # row-major: some of the rows have all of their states
    shards["h"] = shards["hv"] = shard("hv", H)
    place = lambda name: NamedSharding(mesh, P(*map(shards.get, axes[name])))

    def call(*operands: jax.Array) -> tuple[jax.Array, ...]:  # on one device's shards: no mesh
        with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
            return _call(sig, *operands)

    return mesh, call, tuple(map(place, _results(sig))), tuple(map(place, sig.names))


def _parts(mesh: Any, entry: Any) -> int:
    """Into how many parts an entry of a PartitionSpec cuts its axis."""
    names = (entry,) if isinstance(entry, str) else entry or ()
    return math.prod(mesh.shape[name] for name in names)


def _check_pool(sig: Signature, pool: Any) -> None:
    """An error where the slots of a pool are in several places, before XLA would gather them."""
    spec, axis = pool.sharding.spec, len(pool.shape) - 4
    if axis < len(spec) and _parts(pool.sharding.mesh, spec[axis]) > 1:
        raise NotImplementedError(
            f"`{sig.config.state_name}` must have its axis of slots on every device, or be used "
            f"inside jax.shard_map, whose devices have pools of their own; got a pool of shape "
            f"{list(pool.shape)} sharded as {spec}"
        )


# ---- Transforms ---------------------------------------------------------------------------------


def _batch(sig: Signature, size: int, batched: Sequence[bool], operands: Sequence[jax.Array]):
    """Operands with one more leading axis, except gate parameters that all rows share."""
    if sig.pooled and not sig.named(batched)["initial_state"]:
        raise NotImplementedError(
            f"`{sig.config.state_name}` must be mapped by jax.vmap where anything else is: every "
            "call would return a pool of its own; batch `state_indices` instead"
        )
    rows = operands[0].shape[batched[0] : -3]

    def prepend(name: str, a: jax.Array, is_batched: bool) -> jax.Array:
        shared = a.ndim - is_batched == _GATE_PARAMETERS.get(name)
        if shared and is_batched:  # from now on one for each row
            a = jnp.expand_dims(a, tuple(range(1, 1 + len(rows))))
            return jnp.broadcast_to(a, (size, *rows, *a.shape[1 + len(rows) :]))
        return a if shared or is_batched else jax.lax.broadcast(a, (size,))

    return tuple(map(prepend, sig.names, operands, batched))


def _backward(sig: Signature, inputs: dict[str, jax.Array], cotangents: tuple[jax.Array, ...]):
    """Cotangents of all operands of a forward call, None for offsets and indices."""
    if sig.pooled:
        gradients = _cotangents(functools.partial(_reference, sig), inputs, cotangents)
        return tuple(map(gradients.get, sig.names))
    operands = {name: inputs[name] for name in sig.names}  # residuals are sorted
    operands |= dict(zip(("do", "dfinal_state"), cotangents, strict=False))
    gradient = Signature(sig.config, tuple(operands), sig.offsets_step)
    results = dict(zip(_results(gradient), _op(gradient)(*operands.values()), strict=True))
    for name, own in _GATE_PARAMETERS.items():
        if name in inputs and inputs[name].ndim == own:  # shared by all rows
            rows = results[f"d{name}"]
            results[f"d{name}"] = jnp.sum(rows, axis=tuple(range(rows.ndim - own)))
    return tuple(results.get(f"d{name}") for name in sig.names)


def _backward_of_gradient(sig: Signature, inputs: dict[str, jax.Array], cotangents: Any):
    """Cotangents of all operands of a gradient's call, None for offsets: the reference's."""
    gradients = _cotangents(functools.partial(_reference_gradient, sig), inputs, cotangents)
    return tuple(map(gradients.get, sig.names))


def _in_plain_axes(sig: Signature, op: Callable, operands: Sequence[jax.Array]):
    """Calls op where explicit mesh axes are automatic, on operands that vary over the same axes.

    So Shardy partitions the call as on any mesh, the branches of platform_dependent have one type,
    and what op returns varies as much as any operand.
    """
    types = [jax.typeof(a) for a in operands]
    if sig.pooled:
        _check_pool(sig, sig.named(types)["initial_state"])
    varying = frozenset().union(*(t.manual_axis_type.varying for t in types))
    missing = [tuple(varying - t.manual_axis_type.varying) for t in types]
    operands = [
        jax.lax.pcast(a, axes, to="varying") if axes else a
        for a, axes in zip(operands, missing, strict=True)
    ]
    meshes = (t.sharding.mesh for t in types)
    if (mesh := next((m for m in meshes if m.explicit_axes), None)) is None:
        return op(*operands)

    # o is sharded as out or v are; a state as the given one, or by rows and heads as o is.
    spec = lambda t: (*t.sharding.spec, *[None] * (t.ndim - len(t.sharding.spec)))
    x = sig.named(types)
    o = spec(x.get("out", x["v"]))
    state = x.get("final_state", x.get("initial_state"))
    specs = o, spec(state) if state is not None else (*o[:-3], o[-2], None, None)
    shardings = tuple(NamedSharding(mesh, P(*s)) for s in specs[: len(_results(sig))])
    return jax.sharding.auto_axes(op, axes=mesh.explicit_axes, out_sharding=shardings)(*operands)


@functools.cache
def _op(sig: Signature) -> Callable[..., tuple[jax.Array, ...]]:
    """A call that can be batched, partitioned and differentiated."""
    call = functools.partial(_call, sig)
    partitioned = custom_partitioning(call)
    partitioned.def_partition(
        functools.partial(_partition, sig), sharding_rule=functools.partial(_sharding_rule, sig)
    )

    @custom_vmap
    def batched(*operands):
        # custom_partitioning aborts the process where some mesh axes are manual and others are not.
        mesh = jax.sharding.get_abstract_mesh()
        partially_manual = bool(mesh.manual_axes) and len(mesh.manual_axes) < len(mesh.axis_names)
        return call(*operands) if partially_manual else partitioned(*operands)

    @batched.def_vmap
    def _(size, is_batched, *operands):
        results = batched(*_batch(sig, size, is_batched, operands))
        return results, (True,) * len(results)

    differentiable = jax.custom_vjp(batched)

    def forward(*operands):  # itself differentiable, for second derivatives
        return differentiable(*operands), sig.named(operands)

    backward = _backward_of_gradient if sig.is_gradient else _backward
    differentiable.defvjp(forward, functools.partial(backward, sig))
    return differentiable


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _refuse_derivatives(sig: Signature, operands: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    del sig
    return operands


@functools.partial(_refuse_derivatives.defjvp, symbolic_zeros=True)
def _(sig, _, tangents):
    names = {name: name for name in sig.names} | {"initial_state": sig.config.state_name}
    moving = [n for n, t in sig.named(tangents[0]).items() if not isinstance(t, SymbolicZero)]
    raise NotImplementedError(
        "`fwd` must not be differentiated: it writes into buffers. Use `chunk_kda` with "
        "use_qk_l2norm_in_kernel, use_gate_in_kernel and use_beta_sigmoid_in_kernel, which is the "
        "same as a function, or jax.lax.stop_gradient on the arguments; got a derivative with "
        f"respect to {', '.join(f'`{names[n]}`' for n in moving)}"
    )


def _checkpoint_name(name: str, a: jax.Array) -> jax.Array:
    return checkpoint_name(a, f"kda_{name}")


@functools.cache
def _build(sig: Signature) -> Callable[..., tuple[jax.Array, ...]]:
    def run(*operands):
        plain = sig.config.implementation == "reference"
        op = (lambda *a: _reference(sig, sig.named(a))) if plain else _op(sig)
        operands = tuple(map(_checkpoint_name, sig.names, operands))
        if not sig.config.differentiable:
            operands = _refuse_derivatives(sig, operands)
        results: Any = _in_plain_axes(sig, op, operands)
        return tuple(map(_checkpoint_name, _results(sig), results))

    run.__name__ = run.__qualname__ = sig.target  # in profiles, logs and XLA's modules
    return jax.jit(run)


def fwd(
    config: Config,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    A_log: jax.Array | None = None,
    dt_bias: jax.Array | None = None,
    offsets: jax.Array | None = None,
    initial_state: jax.Array | None = None,
    state_indices: jax.Array | None = None,
    output_state_indices: jax.Array | None = None,
    checkpoint_indices: jax.Array | None = None,
    out: jax.Array | None = None,
    final_state: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """`reference.chunk_fwd` on validated arguments, by the op's kernel where there is one.

    o is written into `out`, and a returned state into `final_state` or else `initial_state`, where
    that array's memory is free for it: donated, or not used afterwards. Else XLA copies it first.
    """
    assert final_state is None or config.output_final_state
    operands = dict(
        q=q,
        k=k,
        v=v,
        g=g,
        beta=beta,
        A_log=A_log,
        dt_bias=dt_bias,
        offsets=offsets,
        initial_state=initial_state,
        state_indices=state_indices,
        output_state_indices=output_state_indices,
        checkpoint_indices=checkpoint_indices,
        out=out,
        final_state=final_state,
    )
    given = {name: a for name, a in operands.items() if a is not None}
    offsets_step = 0 if offsets is None else 1 if offsets.ndim == 1 else 2
    o, *state = _build(Signature(config, tuple(given), offsets_step))(*given.values())
    return o, state[0] if state else None
