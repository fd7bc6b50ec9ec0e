# pyright: reportMissingImports=false
"""How each library is called for one case.

`call(case, x, o, state)` runs the whole operation on arrays x (q k v g beta A_log dt_bias h0 cu)
and returns (o, state); o and state are buffers that an in-place library writes. `train` is the same
to be differentiated; None: it can't be. `prepare` is what the library asks its caller to do first,
outside the timing: the `note` says so where it matters.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any


@dataclass(frozen=True)
class Implementation:
    module: str  # import name: not installed, not measured
    framework: str  # jax or torch
    call: Callable[..., Any]
    train: Callable[..., Any] | None = None
    prepare: Callable[..., Any] | None = None
    in_place: bool = False
    state_k_first: bool = False
    refuses: Callable[..., str | None] = lambda case: None  # why a case cannot be run
    note: str = ""
    env: tuple[str, ...] = ()  # NAME=VALUE, for its process alone


def jax_kda_fwd(case, x, o, state):
    import jax_kda

    return jax_kda.fwd(
        x["q"], x["k"], x["v"], x["g"], x["beta"], case.scale, o, x["A_log"], x["dt_bias"],
        case.lower_bound, initial_state=x["h0"], final_state=state, cu_seqlens=x.get("cu"),
    )  # fmt: skip


def jax_kda_chunk(case, x, o, state, implementation=None):
    import jax_kda

    return jax_kda.chunk_kda(
        x["q"], x["k"], x["v"], x["g"], x["beta"], implementation=implementation,
        A_log=x["A_log"], dt_bias=x["dt_bias"], lower_bound=case.lower_bound, scale=case.scale,
        initial_state=x["h0"], output_final_state=True, cu_seqlens=x.get("cu"),
        use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True,
    )  # fmt: skip


def flash_kda_fwd(case, x, o, state):
    import flash_kda

    flash_kda.fwd(
        x["q"], x["k"], x["v"], x["g"], x["beta"], case.scale, o, x["A_log"], x["dt_bias"],
        case.lower_bound, initial_state=x["h0"], final_state=state, cu_seqlens=x.get("cu"),
    )  # fmt: skip
    return o, state


def fla_chunk_kda(case, x, o, state):
    from fla.ops.kda import chunk_kda

    return chunk_kda(
        q=x["q"], k=x["k"], v=x["v"], g=x["g"], beta=x["beta"],
        A_log=x["A_log"], dt_bias=x["dt_bias"].reshape(-1), scale=case.scale,
        lower_bound=case.lower_bound, safe_gate=case.lower_bound is not None,
        initial_state=x["h0"], output_final_state=True, cu_seqlens=x.get("cu"),
        use_gate_in_kernel=True, use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True,
    )  # fmt: skip


def jla_activate(case, x):
    import jax
    import jax.numpy as jnp

    g = x["g"].astype(jnp.float32) + x["dt_bias"]
    slope = jnp.exp(x["A_log"])[:, None]
    if case.lower_bound is None:
        g = -slope * jax.nn.softplus(g)
    else:
        g = case.lower_bound * jax.nn.sigmoid(slope * g)
    return {**x, "g": g, "beta": jax.nn.sigmoid(x["beta"].astype(jnp.float32))}


def jla_core(case, x, o, state):
    from jla.ops import linear_attention

    return linear_attention(
        "kda", x["q"], x["k"], x["v"], g=x["g"], beta=x["beta"], scale=case.scale,
        initial_state=x["h0"], output_final_state=True, use_qk_l2norm=True, impl="mosaic_gpu",
    )  # fmt: skip


def jla_whole(case, x, o, state):
    return jla_core(case, jla_activate(case, x), o, state)


def cudnn_pack(case, x):
    """cuDNN takes all tokens end to end, with int32 offsets always."""
    import torch

    packed = {name: x[name].flatten(0, 1) for name in ("q", "k", "v", "g", "beta")}
    return {**x, **packed, "cu": torch.tensor(case.offsets, dtype=torch.int32, device="cuda")}


def cudnn_activate(case, x):
    import torch

    x = cudnn_pack(case, x)
    g = x["g"].float() + x["dt_bias"]
    slope = x["A_log"].exp()[:, None]
    if case.lower_bound is None:
        g = -slope * torch.nn.functional.softplus(g)
    else:
        g = case.lower_bound * torch.sigmoid(slope * g)
    q, k = (torch.nn.functional.normalize(x[n].float(), dim=-1).to(x[n].dtype) for n in "qk")
    return {**x, "q": q, "k": k, "g": g, "beta": x["beta"].float().sigmoid()}


def cudnn_core(plan, case, x, o, state, **options):
    from cudnn.linear_attention.ops import kimi_delta_attention

    return kimi_delta_attention(
        x["q"], x["k"], x["v"], x["g"], x["beta"], x["cu"], scale=case.scale,
        initial_state=x["h0"], output_final_state=True, plan_name=plan, **options,
    )  # fmt: skip


def cudnn_fused(case, x, o, state):
    return cudnn_core(
        "kda_hopper_cuda", case, x, o, state,
        use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True, safe_gate=True,
        gate_lower_bound=case.lower_bound, a_log=x["A_log"], dt_bias=x["dt_bias"],
    )  # fmt: skip


def needs_kernel(case):
    import jax

    import jax_kda

    if jax.default_backend() == "gpu" and not jax_kda.handlers()["kda_chunk_fwd"].get("cuda"):
        return "no CUDA handler runs here"
    return None


def needs_lower_bound(case):
    return "no softplus gate" if case.lower_bound is None else None


def needs_few_tokens(case):
    return "one token at a time: short sequences only" if case.T > 2048 else None


def needs_rows(case):
    return "no packed sequences" if case.lens else None


jax_kda_reference = partial(jax_kda_chunk, implementation="reference")

NO_GATE = "l2norm, gate and sigmoid not included"
NO_JLA_GATE = "gate and sigmoid not included"
CUTS = "cuts history where gates are strong and heads few"

IMPLEMENTATIONS = {
    "jax_kda": Implementation(
        "jax_kda", "jax", jax_kda_fwd, jax_kda_chunk, in_place=True, refuses=needs_kernel
    ),
    "reference": Implementation(
        "jax_kda", "jax", jax_kda_reference, jax_kda_reference, refuses=needs_few_tokens
    ),
    "flash_kda": Implementation("flash_kda", "torch", flash_kda_fwd, refuses=needs_lower_bound),
    "fla": Implementation(
        "fla", "torch", fla_chunk_kda, fla_chunk_kda, state_k_first=True, env=("FLA_FLASH_KDA=0",)
    ),
    "jla": Implementation(
        "jla",
        "jax",
        jla_whole,
        jla_whole,
        state_k_first=True,
        refuses=needs_rows,
    ),
    "jla_core": Implementation(
        "jla",
        "jax",
        jla_core,
        prepare=jla_activate,
        state_k_first=True,
        refuses=needs_rows,
        note=NO_JLA_GATE,
    ),
    "cudnn": Implementation(
        "cudnn", "torch", cudnn_fused, prepare=cudnn_pack, refuses=needs_lower_bound, note=CUTS
    ),
    "cudnn_core": Implementation(
        "cudnn",
        "torch",
        partial(cudnn_core, "kda_hopper_cuda"),
        prepare=cudnn_activate,
        note=f"{NO_GATE}; {CUTS}",
    ),
    "cudnn_exact": Implementation(
        "cutlass",
        "torch",
        partial(cudnn_core, "kda_hopper"),
        prepare=cudnn_activate,
        note=NO_GATE,
    ),
}
