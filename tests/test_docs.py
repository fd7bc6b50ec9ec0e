"""The pages of docs/: their Python runs, links lead somewhere, tables say what the code does."""

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("flax", reason="needs jax_kda[flax]")

from jax_kda import layers

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGES = sorted(page.name for page in DOCS.glob("*.md"))


@pytest.mark.parametrize("page", [p for p in PAGES if "```python" in (DOCS / p).read_text()])
def test_examples_run(page: str, tmp_path: Path):
    """All of a page's Python, in order, in one interpreter where warnings are errors."""
    text = (DOCS / page).read_text()
    blocks = list(re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))
    assert len(blocks) == text.count("```python")
    lines = [""] * text.count("\n")  # so that an error has the page's line
    for block in blocks:
        begin = text.count("\n", 0, block.start(1))
        code = block[1].splitlines()
        lines[begin : begin + len(code)] = code
    example = tmp_path / page.replace(".md", ".py")
    example.write_text("\n".join(lines))
    command = [sys.executable, "-W", "error", str(example)]
    env = os.environ | {"JAX_PLATFORMS": "cpu"}
    process = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stderr
    assert process.stderr == ""


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str):
    links = re.findall(r"\]\(([^)#]+)\)", (DOCS / page).read_text())
    assert not [
        link for link in links if not link.startswith("http") and not (DOCS / link).exists()
    ]


def test_table_has_the_options_of_the_layer_and_their_defaults():
    table = (DOCS / "layer.md").read_text().split("| option | default | meaning |")[1]
    rows = [row.split("|")[1:3] for row in table.split("\n\n")[0].splitlines()[2:]]
    told = {name.strip(" `"): default.strip(" `") for name, default in rows}

    def tell(default: object) -> str:
        if default is inspect.Parameter.empty:
            return ""
        if isinstance(default, str):
            return f'"{default}"'
        names = {layers.KERNEL_INIT: "normal(0.02)", layers.BIAS_INIT: "zeros"}
        return names.get(default) or getattr(default, "__name__", repr(default))

    parameters = inspect.signature(layers.KimiDeltaAttention.__init__).parameters
    assert told == {n: tell(p.default) for n, p in parameters.items() if n != "self"}
    assert list(told) == [name for name in parameters if name != "self"]
