"""Imports go downward only, and what is optional is imported where it is needed."""

import ast
import subprocess
import sys
from functools import cache
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


@cache
def parse(path):
    return ast.parse(path.read_text())


def imports(module, path):
    """Every pagetile module that a file imports, at any depth: (line, name)."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(parse(path)):
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


def test_imports_go_downward():
    wrong = [
        f"{module}:{line} imports {name}, which "
        + ("lies above it" if name in MODULES else "is not a module")
        for module, path in MODULES.items()
        for line, name in imports(module, path)
        if is_own(name) and (name not in MODULES or layer(name) > layer(module))
    ]
    assert not wrong, "\n".join(wrong)


def test_operations_never_import_each_other():
    wrong = []
    for module in (name for name in MODULES if fits(inside(name), "ops.*")):
        own = inside(module).split(".")[1]
        for line, name in imports(module, MODULES[module]):
            if is_own(name) and fits(inside(name), "ops.*"):
                other = inside(name).split(".")[1]
                is_shared = (ROOT / "ops" / f"{other}.py").exists()  # operations are folders
                if not is_shared and other != own:
                    wrong.append(f"{module}:{line} imports {name}")
    assert not wrong, "\n".join(wrong)


def libraries(path):
    """Every library that a file imports when it is imported itself: (line, name)."""
    for node in module_level(parse(path)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name.split(".")[0]) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node.lineno, node.module.split(".")[0]


def test_optional_libraries_are_imported_where_they_are_needed():
    wrong = [
        f"{module}:{line} imports {library} at module level"
        for module, path in MODULES.items()
        for line, library in libraries(path)
        if library in OPTIONAL
        and not any(fits(inside(module), pattern) for pattern in OPTIONAL[library])
    ]
    assert not wrong, "\n".join(wrong)


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
    assert [library for _, library in libraries(file)] == ["typer", "transformers"]


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


@cache
def import_everything_public(attempt):
    """The seconds that it takes beyond torch, and the libraries that it brings."""
    script = f"""
import sys, time, torch
before, start = set(sys.modules), time.process_time()
import pagetile
{EVERY_PUBLIC_NAME}
print(time.process_time() - start)
print(*sorted({{name.split(".")[0] for name in set(sys.modules) - before}}))
"""
    seconds, brought = python(script).splitlines()
    return float(seconds), set(brought.split())


def test_importing_everything_public_brings_no_optional_library():
    _, brought = import_everything_public(0)
    assert "pagetile" in brought
    assert not brought & OPTIONAL.keys()


def test_importing_costs_less_than_a_second_beyond_torch():
    assert any(import_everything_public(attempt)[0] < 1 for attempt in range(2))


def test_the_first_import_waits_for_nothing_but_errors():
    assert python("import sys, pagetile; print('torch' in sys.modules)") == "False\n"


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
