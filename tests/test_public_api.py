"""The package's public names exist, are sorted, and are documented."""

import importlib
import inspect
import os
import pkgutil
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

import pagetile
import pagetile.testing
from pagetile.errors import PagetileError

PACKAGES = [
    module.name
    for module in pkgutil.walk_packages(pagetile.__path__, "pagetile.")
    if not {"cli", "server", "integrations", "__main__"} & set(module.name.split("."))
]
WITH_ALL = [
    name for name in ["pagetile", *PACKAGES] if hasattr(importlib.import_module(name), "__all__")
]


def test_the_modules_that_name_their_public_names_include_these():
    assert {"pagetile", "pagetile.testing", "pagetile.ops.paged_attention"} <= set(WITH_ALL)


@pytest.mark.parametrize("name", WITH_ALL)
def test_all_names_exist_and_stand_once(name):
    module = importlib.import_module(name)
    assert len(set(module.__all__)) == len(module.__all__)
    for public in module.__all__:
        assert hasattr(module, public), public


@pytest.mark.parametrize("name", ["pagetile", "pagetile.testing"])
def test_all_is_sorted(name):
    names = importlib.import_module(name).__all__
    assert list(names) == sorted(names, key=lambda word: (not word.isupper(), word))


@pytest.mark.parametrize("name", ["pagetile", "pagetile.testing"])
def test_all_is_exact(name):
    module = importlib.import_module(name)
    public = {
        word
        for word in dir(module)
        if not word.startswith("_") and not isinstance(getattr(module, word), types.ModuleType)
    }
    helpers = {"TYPE_CHECKING", "import_module", "annotations"}
    assert public - helpers == set(module.__all__)


def test_the_version_of_a_source_tree_says_so():
    source = Path(pagetile.__file__).parents[1]
    command = [sys.executable, "-S", "-c", "import pagetile; print(pagetile.__version__)"]
    environment = {**os.environ, "PYTHONPATH": str(source)}  # -S: without what is installed
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert found.stdout == "0+source.tree\n"


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="pagetile"):
        pagetile.paged_atention  # noqa: B018


@pytest.mark.parametrize("name", ["pagetile", "pagetile.testing"])
def test_every_public_name_is_explained(name):
    module = importlib.import_module(name)
    assert inspect.getdoc(module)
    for public in module.__all__:
        value = getattr(module, public)
        if not callable(value):
            continue  # constants carry their words in the source
        assert value.__doc__, public
        generated = value.__doc__.startswith(f"{public}(")  # by dataclass or NamedTuple
        assert not generated, public


@pytest.mark.parametrize("name", ["pagetile", "pagetile.testing"])
def test_every_public_function_explains_its_arguments_and_shows_a_call(name):
    module = importlib.import_module(name)
    for public in module.__all__:
        value = getattr(module, public)
        if not inspect.isfunction(value):
            continue
        parameters = inspect.signature(value).parameters
        if len(parameters) > 1:
            for parameter in parameters:
                assert f"    {parameter.lstrip('*')}" in value.__doc__.replace("**", ""), public
        assert ">>> " in value.__doc__, public


def public_members(kind):
    return {
        name: member
        for name, member in vars(kind).items()
        if not name.startswith("_") and isinstance(member, (types.FunctionType, property))
    }


@pytest.mark.parametrize("name", ["pagetile", "pagetile.testing"])
def test_every_public_method_is_explained(name):
    module = importlib.import_module(name)
    for public in module.__all__:
        value = getattr(module, public)
        if inspect.isclass(value):
            for member_name, member in public_members(value).items():
                assert member.__doc__, f"{public}.{member_name}"


@pytest.mark.parametrize(
    "name", ["pagetile", "pagetile.integrations.swin", "pagetile.integrations.vllm_ops"]
)
def test_the_reference_shows_every_public_name(name):
    page = Path(__file__).parents[1] / "docs" / "reference" / "index.md"
    shown = [*map(pkgutil.resolve_name, re.findall(r"^::: (\S+)$", page.read_text("utf-8"), re.M))]
    modules = [each for each in shown if inspect.ismodule(each)]
    shown += [value for module in modules for value in vars(module).values()]
    module = importlib.import_module(name)
    assert [public for public in module.__all__ if getattr(module, public) not in shown] == []


def test_examples_are_under_the_heading_that_the_site_shows_as_code():
    sources = Path(pagetile.__file__).parent.rglob("*.py")
    assert [path.name for path in sources if re.search(r"(?m)^ *Example:$", path.read_text())] == []


def test_every_error_has_one_root():
    names = [name for name in pagetile.__all__ if name.endswith("Error")]
    assert len(names) == 6
    assert all(issubclass(getattr(pagetile, name), PagetileError) for name in names)
