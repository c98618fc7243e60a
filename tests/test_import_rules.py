"""Imports go downward only, and what is optional is imported where it is needed."""

import ast
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(find_spec("pagetile").origin).parent
MODULES = {
    ".".join(path.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(ROOT.rglob("*.py"))
}

# From the bottom up; a module imports from its own layer and those below. A name includes all
# modules under it, ``*`` is any word, a final ``_`` any ending; the longest matching name decides.
LAYERS = [
    ["errors", "process", "version"],
    ["shapes", "device", "demo", "transfer"],
    ["kv_cache"],
    ["tiles"],
    [
        "ops.dispatch",
        "ops.scales",
        *(
            "ops.*." + file
            for file in ("reference", "plan", "problem", "batch", "value_checks", "cpu", "cpu_")
        ),
        *("ops.attention." + file for file in ("block_mask", "tile_lists")),
        *("ops.*." + file for file in ("triton", "triton_", "hopper", "hopper_")),
    ],
    ["ops"],
    ["fused"],
    ["kv_cache.storage"],
    ["engine", "models"],
    ["integrations", "analysis", "testing"],
    ["server", "cli"],
    ["__main__", ""],
]

# Where a library that the kernels on torch alone do not need may be imported at module level.
OPTIONAL = {
    "numba": ("tiles.cpu", "ops.*.cpu"),
    "llvmlite": ("tiles.cpu",),
    "triton": (
        "tiles.triton",
        "tiles.hopper",
        *("ops.*." + file for file in ("triton", "triton_", "hopper", "hopper_")),
        "fused.*.triton",
        "fused.*.hopper",
        "fused.*.hopper_ring",
        "engine.triton",
        "engine.triton_",
        "integrations.vllm_ops.triton_",
    ),
    "transformers": ("integrations.swin.frameworks",),
    "monai": ("integrations.swin.frameworks",),
    "timm": ("integrations.swin.frameworks",),
    "torchvision": ("integrations.swin.frameworks",),
    "tokenizers": (),
    "safetensors": (),
    "fastapi": ("server",),
    "uvicorn": ("server",),
    "prometheus_client": ("server",),
    "llguidance": (),
    "typer": ("cli",),
    "rich": ("cli",),
    "matplotlib": (),
    "tqdm": (),
    "psutil": (),
    "ray": (),
}


def fits(name, pattern):
    """Whether a module's name begins with a pattern's words."""
    words, wanted = name.split("."), pattern.split(".")
    return len(words) >= len(wanted) and all(
        want in ("*", word) or (want.endswith("_") and word.startswith(want))
        for word, want in zip(words, wanted, strict=False)
    )


def inside(module):
    """A module's name without the package's."""
    return module.removeprefix("pagetile").removeprefix(".")


def layer(module):
    name = inside(module)
    fitting = [
        (len(pattern.split(".")), level)
        for level, patterns in enumerate(LAYERS)
        for pattern in patterns
        if fits(name, pattern)
    ]
    assert fitting, f"{module} stands in no layer: add it to LAYERS"
    return max(fitting)[1]


def imports(module, path):
    """Every pagetile module that a file imports, at any depth: (line, name)."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) + 1 - node.level]
            base = ".".join([*(base if node.level else []), *filter(None, [node.module])])
            for alias in node.names:
                whole = f"{base}.{alias.name}"
                yield node.lineno, whole if whole in MODULES else base


def module_level(node):
    """The statements that run when a module is imported; not those for a type checker."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            continue
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            for other in child.orelse:
                yield other
                yield from module_level(other)
            continue
        yield child
        yield from module_level(child)


def is_own(name):
    return name == "pagetile" or name.startswith("pagetile.")


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_downward(module):
    own = layer(module)
    for line, name in imports(module, MODULES[module]):
        if is_own(name):
            assert name in MODULES, f"{module}:{line} imports {name}, which is not a module"
            assert layer(name) <= own, f"{module}:{line} imports {name}, which lies above it"


@pytest.mark.parametrize("module", [name for name in MODULES if fits(inside(name), "ops.*")])
def test_operations_never_import_each_other(module):
    own = inside(module).split(".")[1]
    for line, name in imports(module, MODULES[module]):
        if is_own(name) and fits(inside(name), "ops.*"):
            other = inside(name).split(".")[1]
            is_shared = (ROOT / "ops" / f"{other}.py").exists()  # a file; operations are folders
            assert is_shared or other == own, f"{module}:{line} imports {name}"


@pytest.mark.parametrize("module", MODULES)
def test_optional_libraries_are_imported_where_they_are_needed(module):
    for node in module_level(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module]
        else:
            continue
        for name in names:
            library = name.split(".")[0]
            allowed = OPTIONAL.get(library)
            assert allowed is None or any(fits(inside(module), pattern) for pattern in allowed), (
                f"{module}:{node.lineno} imports {library} at module level"
            )


def test_the_rules_see_what_they_forbid(tmp_path):
    """Modules that break the rules are found."""
    file = tmp_path / "checks.py"
    file.write_text(
        "from .cpu import run\n"
        "from ...engine import llm\n"
        "from ..write_kv.api import write_kv\n"
        "from ... import shapes\n"
        "def f():\n    import numba\n    from ...server import app\n"
        "if TYPE_CHECKING:\n    import triton\nelse:\n    import typer\n"
        "try:\n    import transformers.models\nexcept ImportError:\n    pass\n"
    )
    names = {name for _, name in imports("pagetile.ops.paged_attention.checks", file)}
    assert names == {
        "pagetile.ops.paged_attention.cpu",
        "pagetile.engine.llm",
        "pagetile.ops.write_kv.api",
        "pagetile.shapes",
        "triton",
        "typer",
        "transformers.models",
        "numba",
        "pagetile.server.app",
    }
    nodes = module_level(ast.parse(file.read_text()))
    found = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    assert found == ["typer", "transformers.models"]


@pytest.mark.parametrize(
    ("low", "high"),
    [
        ("errors", "shapes"),
        ("device", "kv_cache.block_pool"),
        ("kv_cache.prefix_index", "tiles.cpu.simd"),
        ("tiles.state", "ops.merge_states.cpu"),
        ("ops.paged_attention.triton_decode", "ops.paged_attention.api"),
        ("ops.paged_attention.problem", "ops.paged_attention.checks"),
        ("ops.dispatch", "ops.write_kv.api"),
        ("ops.write_kv", "kv_cache.storage"),
        ("kv_cache.storage", "engine.scheduler"),
        ("models.attention", "analysis.page_map"),
        ("testing.paged_cases", "cli.app"),
        ("server.app", "__main__"),
    ],
)
def test_the_layers_are_the_designs(low, high):
    assert layer(f"pagetile.{low}") < layer(f"pagetile.{high}")


# --- what an import costs, and what it needs ------------------------------------------------


def python(script):
    command = [sys.executable, "-W", "error", "-c", script]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


EVERY_PUBLIC_NAME = "[getattr(pagetile, name) for name in pagetile.__all__]"


def test_importing_everything_public_brings_no_optional_library():
    script = f"""
import sys, torch
before = set(sys.modules)
import pagetile
{EVERY_PUBLIC_NAME}
print(*sorted({{name.split(".")[0] for name in set(sys.modules) - before}}))
"""
    brought = set(python(script).split())
    assert "pagetile" in brought
    assert not brought & OPTIONAL.keys()


def test_the_first_import_waits_for_nothing_but_errors():
    assert python("import sys, pagetile; print('torch' in sys.modules)") == "False\n"


def test_importing_costs_less_than_a_second_beyond_torch():
    script = f"""
import time, torch
start = time.process_time()
import pagetile
{EVERY_PUBLIC_NAME}
print(time.process_time() - start)
"""
    assert any(float(python(script)) < 1 for _ in range(2))


BLOCKED = """
import sys
for name in {names}:
    sys.modules[name] = None
import torch, pagetile
from pagetile.ops.copy_blocks import copy_blocks
from pagetile.ops.merge_states import merge_states
from pagetile.ops.write_kv import write_kv
from pagetile.testing import PagedCase, assert_matches, make_inputs

inputs = make_inputs(PagedCase((1, 5), (30, 5), dtype=torch.bfloat16))
result = inputs.attend(impl="reference")
assert_matches(result, inputs)
merge_states(result.out[None], result.lse[None], impl="reference")
slots = torch.tensor([3, -1])
write_kv(*torch.randn(2, 2, 2, 64).unbind(0), *torch.zeros(2, 4, 16, 2, 64).unbind(0), slots,
         impl="reference")
copy_blocks([inputs.k_cache], torch.tensor([[0, 1]]), impl="reference")
"""


def test_the_reference_runs_on_torch_and_numpy_alone():
    python(BLOCKED.format(names=[*OPTIONAL]))
