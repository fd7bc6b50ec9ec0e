# pyright: reportMissingImports=false
"""Arrays and seconds per call in JAX and in PyTorch, by one set of names.

Every timed call writes its whole result. Cases that fit in the cache rotate over copies (`sets`).
"""

import math
import statistics
import time
from functools import partial

import ml_dtypes
import numpy as np
from cases import DIFFERENTIABLE

SAMPLE_SECONDS = 0.03  # hides how a batch of calls is started
CALLS_SECONDS = 0.2  # where Python starts every one of them
CASE_SECONDS = 2


def timed(run, sync, sample_seconds: float = SAMPLE_SECONDS) -> list[float]:
    """Seconds of run() in each of 5 to 15 batches. Call it once before: nothing is warmed up."""

    def batch(repeats: int) -> float:
        begin = time.perf_counter()
        for _ in range(repeats):
            run()
        sync()
        return (time.perf_counter() - begin) / repeats

    once = batch(1)
    repeats = math.ceil(sample_seconds / once)
    samples = min(15, max(5, int(CASE_SECONDS / (repeats * once))))
    return [batch(repeats) for _ in range(samples)]


class Jax:
    def __init__(self, platform: str):
        import jax

        if platform == "cpu":
            jax.config.update("jax_platforms", "cpu")
        self.device = jax.devices()[0]
        if self.device.platform != platform:
            raise RuntimeError(f"JAX has no {platform} here")
        # Other programs on a CPU only ever add to the time.
        self.typical = min if platform == "cpu" else statistics.median

    def array(self, x: np.ndarray):
        import jax

        return jax.device_put(x, self.device)

    def offsets(self, case):
        return self.array(np.asarray(case.offsets, np.int32))

    def copies(self, x: dict, count: int):
        import jax.numpy as jnp

        return [x, *({n: jnp.array(a, copy=True) for n, a in x.items()} for _ in range(count - 1))]

    def numpy(self, x) -> np.ndarray:
        return np.asarray(x, np.float64)

    def run(self, impl, case, x, o, state):
        import jax

        donated = ("o", "state") if impl.in_place else ()
        call = lambda x, o, state: impl.call(case, x, o, state)
        return jax.jit(call, donate_argnames=donated)(x, o, state)

    def training(self, impl, case, x):
        """A compiled function of x, forward pass and all gradients; its results; its memory."""
        import jax

        def both(x):
            inputs = {name: x[name] for name in DIFFERENTIABLE}
            forward = lambda inputs: impl.train(case, x | inputs, None, None)
            (o, state), pull = jax.vjp(forward, inputs)
            (gradients,) = pull((x["do"].astype(o.dtype), x["dstate"].astype(state.dtype)))
            return o, state, [gradients[name] for name in DIFFERENTIABLE]

        call = jax.jit(both).lower(x).compile()
        memory = call.memory_analysis()
        sizes = (f"{what}_size_in_bytes" for what in ("argument", "output", "temp"))
        return call, *call(x), sum(getattr(memory, size) for size in sizes)

    def time_calls(self, call, arguments):
        """Compiled calls, started without waiting: of a chain in one function XLA would leave out
        whatever is not used or does not change.
        """
        import jax

        results = []

        def step():
            results[:] = [call(*a) for a in arguments]

        step()
        samples = timed(step, lambda: jax.block_until_ready(results), CALLS_SECONDS)
        return [s / len(arguments) for s in samples], "one jit per call", *results[0]

    def time(self, impl, case, sets, outs, state):
        """In place: calls chained in one jitted function, each writing what the last returned."""
        import jax

        if not impl.in_place:
            call = jax.jit(lambda x: impl.call(case, x, None, None))
            return self.time_calls(call, [(x,) for x in sets])

        @partial(jax.jit, static_argnames="cycles", donate_argnames=("outs", "state"))
        def chain(sets, outs, state, cycles):
            for _ in range(cycles):
                for i, x in enumerate(sets):
                    outs[i], state = impl.call(case, x, outs[i], state)
            return outs, state

        def step():
            nonlocal outs, state
            outs, state = chain(sets, outs, state, cycles)

        sync = lambda: jax.block_until_ready((outs, state))
        cycles = 1
        step()
        cycles = max(1, min(32 // len(sets), int(SAMPLE_SECONDS / min(timed(step, sync)))))
        step()
        calls = cycles * len(sets)
        samples = [s / calls for s in timed(step, sync)]
        return samples, f"chain of {calls} in one jit", outs[0], state

    def rates(self):
        """Bytes per second of a large copy, FLOP per second of a large matrix product."""
        import jax
        import jax.numpy as jnp

        gpu = self.device.platform == "gpu"
        x = jnp.ones(2**29 if gpu else 2**26, jnp.float32)
        shape, dtype = ((1, 8192, 8192), jnp.bfloat16) if gpu else ((256, 128, 128), jnp.float32)
        a, b = (jax.random.normal(jax.random.key(i), shape, dtype) for i in (0, 1))

        def seconds(f, result, *rest):
            def step():
                nonlocal result
                result = f(result, *rest)

            step()
            return self.typical(timed(step, lambda: jax.block_until_ready(result)))

        nbytes = 2 * x.nbytes
        flops = 2 * shape[0] * shape[1] ** 2 * shape[2]
        copy = jax.jit(lambda x: x + 1, donate_argnums=0)
        matmul = jax.jit(lambda _, a, b: a @ b)
        return nbytes / seconds(copy, x), flops / seconds(matmul, a, a, b)


class Torch:
    def __init__(self, platform: str):
        import torch

        if platform != "gpu" or not torch.cuda.is_available():
            raise RuntimeError(f"PyTorch has no {platform} here")
        self.typical = statistics.median

    def array(self, x: np.ndarray):
        import torch

        if x.dtype == ml_dtypes.bfloat16:
            return torch.from_numpy(x.view(np.int16)).cuda().view(torch.bfloat16)
        return torch.from_numpy(x).cuda()

    def offsets(self, case):
        return self.array(np.asarray(case.offsets, np.int64))

    def copies(self, x: dict, count: int):
        return [x, *({n: a.clone() for n, a in x.items()} for _ in range(count - 1))]

    def numpy(self, x) -> np.ndarray:
        return x.double().cpu().numpy()

    def run(self, impl, case, x, o, state):
        import torch

        with torch.inference_mode():
            return impl.call(case, x, o, state)

    def training(self, impl, case, x):
        """A function of x, forward pass and all gradients; its results; its peak of memory."""
        import torch

        def call(x):
            leaves = {name: x[name].detach().requires_grad_() for name in DIFFERENTIABLE}
            results = impl.train(case, x | leaves, None, None)
            cotangents = (x["do"], x["dstate"])
            gradients = torch.autograd.grad(results, tuple(leaves.values()), cotangents)
            return *(a.detach() for a in results), gradients

        call(x)  # the first call may need memory to choose its kernels
        torch.cuda.reset_peak_memory_stats()
        results = call(x)
        torch.cuda.synchronize()
        return call, *results, torch.cuda.max_memory_allocated()

    def time(self, impl, case, sets, outs, state):
        arguments = [(x, o, state) for x, o in zip(sets, outs, strict=True)]
        return self.time_calls(partial(self.run, impl, case), arguments)

    def time_calls(self, call, arguments):
        """Replays of a CUDA graph with all of them; plain calls where capture fails."""
        import torch

        def cycle():
            return [call(*a) for a in arguments]

        graph, results, how = torch.cuda.CUDAGraph(), cycle(), "graph replay"
        step = graph.replay
        try:
            with torch.cuda.graph(graph):
                results = cycle()
        except Exception as error:  # each library has its own
            how = f"plain calls; no graph: {error}".splitlines()[0]
            step = cycle
        samples = [s / len(arguments) for s in timed(step, torch.cuda.synchronize)]
        return samples, how, *results[0]
