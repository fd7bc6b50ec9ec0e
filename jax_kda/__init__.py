"""Kimi Delta Attention for JAX, as compiled kernels that write in place."""

import importlib.metadata

from .api import chunk_kda as chunk_kda
from .api import fwd as fwd
from .api import kda_gate as kda_gate
from .api import recurrent_kda as recurrent_kda
from .primitive import FFI_TARGETS as FFI_TARGETS
from .primitive import handlers as handlers

__version__ = importlib.metadata.version("jax_kda")
