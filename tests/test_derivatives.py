"""Derivatives under JAX's transforms, on the CPU. tests/test_gradients.py has the numbers."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from calls import (
    DIFFERENTIABLE,
    FORMS,
    assert_same,
    forms,
    gradient,
    grid,
    kernel,
    loop,
    loss,
    make,
    op,
    ops,
    reference,
    stack,
    step,
)

import jax_kda

pytestmark = pytest.mark.usefixtures("on_the_cpu")


@forms
def test_gradient(form):
    x = make(**FORMS[form])
    assert_same(gradient(op, x), gradient(reference, x))


@pytest.mark.parametrize("result", [0, 1])
def test_gradient_of_one_result(result):
    only = lambda f: lambda x: (f(x)[result],)
    assert_same(gradient(only(op), make()), gradient(only(reference), make()))


def test_gradient_without_optional_arguments():
    x = {name: a for name, a in make().items() if name not in ("A_log", "dt_bias", "initial_state")}
    f = lambda implementation: lambda x: jax_kda.chunk_kda(**x, implementation=implementation)[:1]
    assert_same(gradient(f(None), x), gradient(f("reference"), x))


@forms
def test_vmap_of_gradient_and_gradient_of_vmap(form):
    x, axes, calls = stack(["q", "A_log", "initial_state"], 3, form)
    per_call: dict = loop(functools.partial(gradient, reference), calls)
    assert_same(jax.vmap(functools.partial(gradient, kernel), (axes,))(x), per_call)

    # What is not batched feeds every call, so its gradient is a sum; the loss weighs calls alike.
    losses = jax.vmap(functools.partial(loss, kernel), (axes,))
    total = jax.jit(jax.grad(lambda inputs: jnp.sum(losses(x | inputs))))
    expected = {name: a if axes[name] == 0 else a.sum(0) for name, a in per_call.items()}
    assert_same(total({name: x[name] for name in expected}), expected)


def test_gradient_of_nested_vmap():
    x, cells = grid(["q", "A_log"], ["dt_bias", "A_log"], (3, 2), "rows")
    inner = {name: 0 if name in ("q", "A_log") else None for name in x}
    outer = {name: 0 if name in ("dt_bias", "A_log") else None for name in x}
    nested = jax.vmap(jax.vmap(functools.partial(gradient, kernel), (inner,)), (outer,))
    per_call = functools.partial(gradient, reference)
    assert_same(nested(x), loop(functools.partial(loop, per_call), cells))


# ---- Other modes and orders ----------------------------------------------------------------------


@ops
@pytest.mark.parametrize("form", ["rows", "cu_seqlens"])
def test_second_derivatives_in_reverse_mode(f, form):
    """Of everything, by everything: the kernel's gradient is differentiated as plain JAX."""

    def twice(f, x):
        size = lambda x: sum(jnp.vdot(a, a) for a in gradient(f, x).values())
        return gradient(lambda x: (size(x),), x)

    x = make(**FORMS[form] | {"T": 5})
    assert_same(jax.jit(twice, static_argnums=0)(f, x), twice(reference, x), 1e-4)


FORWARD = {
    "jvp": lambda f, q, dq: jax.jvp(f, (q,), (dq,)),
    "jacfwd": lambda f, q, dq: jax.jacfwd(f)(q),
    "linearize": lambda f, q, dq: jax.linearize(f, q)[1](dq),
    "hessian": lambda f, q, dq: jax.hessian(lambda q: jnp.sum(f(q) ** 2))(q),
    "forward over reverse": lambda f, q, dq: jax.jvp(
        jax.grad(lambda q: jnp.sum(f(q) ** 2)), (q,), (dq,)
    ),
}


@ops
@pytest.mark.parametrize("mode", FORWARD)
def test_forward_mode_is_refused_by_jax(mode, f):
    x = make(T=2)
    of_q = lambda q: f(x | {"q": q})[0]
    for call in (FORWARD[mode], jax.jit(FORWARD[mode], static_argnums=0)):
        with pytest.raises(TypeError, match="forward-mode"):
            call(of_q, x["q"], x["k"])


@ops
def test_forward_mode_of_the_reference(f):
    """Its tangents are those that the kernels' gradients imply, and so is its Hessian."""
    x = make(B=1, T=3, H=1, HV=2, K=3, V=2)
    of_q = lambda implementation: lambda q: f(x | {"q": q}, implementation)[0]
    plain, kernels = of_q("reference"), of_q("ffi")
    slope = jax.grad(lambda q: jnp.sum(kernels(q) ** 2))
    jacobian, hessian = jax.jacrev(kernels)(x["q"]), jax.jacrev(slope)(x["q"])
    along = lambda derivative: jnp.tensordot(derivative, x["k"], x["k"].ndim)
    expected = {
        "jvp": (plain(x["q"]), along(jacobian)),
        "jacfwd": jacobian,
        "linearize": along(jacobian),
        "hessian": hessian,
        "forward over reverse": (slope(x["q"]), along(hessian)),
    }
    for mode, call in FORWARD.items():
        actual = jax.jit(call, static_argnums=0)(plain, x["q"], x["k"])
        assert_same(actual, expected[mode], 1e-4)


# ---- fwd -----------------------------------------------------------------------------------------


def fwd(x):
    pool = x["initial_state"] if "state_indices" in x else None
    return jax_kda.fwd(**x, scale=None, lower_bound=None, out=None, final_state=pool)


DERIVATIVES = {
    "grad": gradient,
    "vjp": lambda f, x: jax.vjp(f, x),
    "jvp": lambda f, x: jax.jvp(f, (x,), (x,)),
    "linearize": lambda f, x: jax.linearize(f, x),
    "vmap of grad": lambda f, x: jax.vmap(functools.partial(gradient, f))(
        {name: a[None] for name, a in x.items()}
    ),
    "scan": lambda f, x: gradient(lambda x: jax.lax.scan(lambda c, _: (c, f(x)), 0, None, 2)[1], x),
    "remat": lambda f, x: gradient(jax.checkpoint(f), x),
}


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("how", DERIVATIVES)
def test_derivatives_of_fwd_are_refused(how, jit):
    x = make(T=5)
    f = lambda x: (fwd(x),)
    names = ", ".join(f"`{name}`" for name in DIFFERENTIABLE)
    message = rf"^`fwd` must not be differentiated.*`chunk_kda`.*; got .* with respect to {names}"
    with pytest.raises(NotImplementedError, match=message):
        DERIVATIVES[how](jax.jit(f) if jit else f, x)


@pytest.mark.parametrize("form", ["rows", "cu_seqlens", "pool"])
def test_derivatives_of_fwd_are_refused_by_name(form):
    x = make(**FORMS[form])
    for name in ("q", "dt_bias", "initial_state"):
        f = lambda a, name=name: loss(lambda x: jax.tree.leaves(fwd(x)), x | {name: a})
        with pytest.raises(NotImplementedError, match=rf"(?m) with respect to `{name}`$"):
            jax.jit(jax.grad(f))(x[name])


@pytest.mark.parametrize("name", ["out", "final_state"])
def test_derivatives_by_what_is_written_are_refused(name):
    x = make(**FORMS["pool"])
    buffers = {"out": x["v"], "final_state": x.pop("initial_state")}
    call = lambda **buffers: jax_kda.fwd(**x, scale=None, lower_bound=None, **buffers)
    f = lambda a: loss(lambda buffers: call(**buffers), buffers | {name: a})
    with pytest.raises(NotImplementedError, match=rf"(?m) with respect to `{name}`$"):
        jax.grad(f)(buffers[name])


def test_fwd_beside_what_is_differentiated():
    """Where no argument is, nothing is refused."""
    x = make(T=5)
    total = loss(lambda x: reference(x)[:1], x)
    for f in (fwd, jax.jit(fwd), jax.checkpoint(fwd)):
        of_x = lambda x, f=f: loss(lambda x: [f(x)], x)
        assert_same(jax.grad(lambda w, of_x=of_x: w * of_x(x))(jnp.float32(3)), total)
        stopped = lambda x, of_x=of_x: jnp.sum(x["q"] ** 2) + of_x(jax.lax.stop_gradient(x))
        assert_same(jax.jit(jax.grad(stopped))(x)["q"], 2 * x["q"])


# ---- Remat ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "policy", [None, "everything_saveable", "nothing_saveable", "dots_with_no_batch_dims_saveable"]
)
def test_remat_changes_no_bit_of_the_gradient(policy):
    x = make()
    if policy is not None:
        policy = getattr(jax.checkpoint_policies, policy)
    f = lambda x: op(x | {"q": jnp.sin(x["q"])})
    plain, again = jax.jit(
        lambda x: (gradient(f, x), gradient(jax.checkpoint(f, policy=policy), x))
    )(x)
    jax.tree.map(np.testing.assert_array_equal, plain, again)


NAMES = jax.checkpoint_policies.save_only_these_names
PROJECTED = ("kda_q", "kda_k", "kda_g")


@ops
@pytest.mark.parametrize(
    "policy, forward_calls, products",
    [
        (jax.checkpoint_policies.nothing_saveable, 2, 12),
        (NAMES("kda_o"), 1, 12),
        (NAMES(*PROJECTED), 2, 9),
        (NAMES("kda_o", *PROJECTED), 1, 9),
        (jax.checkpoint_policies.save_any_names_but_these("kda_o"), 2, 9),
        (jax.checkpoint_policies.everything_saveable, 1, 9),
    ],
)
def test_names_say_what_is_kept(policy, forward_calls, products, f):
    """In a scan over layers. Each of three projections is a product forwards and two backwards."""
    x = make(H=6, V=4)
    weights = jax.random.normal(jax.random.key(0), (3, 3, 4, 4))

    def layer(h, weights):
        projected = zip(("q", "k", "g"), weights, strict=True)
        return h + jnp.sin(f(x | {name: h @ w for name, w in projected})[0]), None

    def run(layer):
        loss = lambda weights: jnp.sum(jax.lax.scan(layer, x["v"], weights)[0] ** 2)
        compiled = jax.jit(jax.value_and_grad(loss)).lower(weights).compile()
        return compiled(weights), str(compiled.as_text())

    plain, _ = run(layer)
    again, text = run(jax.checkpoint(layer, policy=policy, prevent_cse=False))
    target = "kda_recurrent_fwd" if f is step else "kda_chunk_fwd"
    assert text.count(f'custom_call_target="{target}"') == forward_calls
    assert text.count('custom_call_target="kda_chunk_bwd"') == 1
    assert len(re.findall(r" dot\(", text)) == products
    assert_same(again, plain)


@pytest.mark.parametrize("implementation", [None, "reference"])
@ops
def test_arrays_have_names(f, implementation):
    jaxpr = str(jax.make_jaxpr(f, static_argnums=1)(make(), implementation))
    expected = [f"kda_{name}" for name in (*DIFFERENTIABLE, "o", "final_state")]
    assert re.findall(r"name\[name=(\w+)\]", jaxpr) == expected
