"""Reads a checkpoint from a directory; everything that can be wrong is an error of one line.

Transformers warns about a missing weight and fills it with random numbers; here that is an error.
Nothing is downloaded, and no code of a checkpoint is run.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..errors import PagetileError, RequestError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "tekken.json",
    "spiece.model",
    "vocab.json",
    "vocab.txt",
)
_LOCAL: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
_LENGTH_WARNING = "sequence-length-is-longer-than-the-specified-maximum"


def read_model(
    path: str | os.PathLike[str],
    dtype: torch.dtype | str,
    check: Callable[[PreTrainedConfig], None],
) -> PreTrainedModel:
    """Read a causal language model from a directory, to the CPU.

    Args:
        path: Directory with ``config.json`` and safetensors weights.
        dtype: ``"auto"``, a torch type or its name.
        check: Called with the config before any weight is read; may raise.

    Raises:
        RequestError: Something is missing or broken; the message says what, where and what to do.
    """
    dtype = _name_dtype(dtype)
    config = read_config(path)
    check(config)
    directory = Path(path)
    _check_weights(directory)
    with _quiet():
        return _read_weights(directory, config, dtype)


def read_config(path: str | os.PathLike[str]) -> PreTrainedConfig:
    """Read a checkpoint's config only.

    Raises:
        RequestError: There is no such directory, or its config cannot be read.
    """
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    directory = _find_directory(path)
    file = directory / "config.json"
    if not file.is_file():
        raise RequestError(f"{directory} has no config.json: it is not a Transformers checkpoint")
    model_type = _read_json(file).get("model_type")
    if model_type not in CONFIG_MAPPING:
        raise RequestError(
            f"{file} has model_type {model_type!r}, which this version of Transformers does not "
            "know: update it (code from a checkpoint is not run)"
        )
    with _quiet(), explained(f"{file} is not accepted by Transformers"):
        config: PreTrainedConfig = AutoConfig.from_pretrained(directory, **_LOCAL)
    return config


def load_tokenizer(path: str | os.PathLike[str]) -> PreTrainedTokenizerFast | None:
    """Read the tokenizer of a checkpoint's directory; ``None`` where it has none.

    Raises:
        RequestError: There is no such directory, or its tokenizer cannot be read.
    """
    from transformers import AutoTokenizer

    directory = _find_directory(path)
    if not any((directory / name).is_file() for name in _TOKENIZER_FILES):
        return None
    try:
        with _quiet(), explained(f"{directory}: its tokenizer cannot be read"):
            tokenizer: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(directory, **_LOCAL)
    except RequestError:
        for name in _TOKENIZER_FILES:  # Transformers' error does not say which is not JSON
            if name.endswith(".json") and (directory / name).is_file():
                _read_json(directory / name)
        raise
    tokenizer.deprecation_warnings[_LENGTH_WARNING] = True  # as if shown: the engine refuses those
    return tokenizer


def _find_directory(path: str | os.PathLike[str]) -> Path:
    directory = Path(path)
    if directory.is_dir():
        return directory
    what = "is a file" if directory.exists() else "does not exist"
    raise RequestError(
        f"model {os.fspath(path)!r} {what}, expected a directory with a checkpoint: nothing is "
        "downloaded, so fetch it first (hf download NAME --local-dir DIRECTORY)"
    )


def _name_dtype(dtype: torch.dtype | str) -> torch.dtype | str:
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if dtype == "auto":
        return "auto"
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise RequestError(
            f"dtype is {dtype!r}, expected 'auto', 'float32', 'float16' or 'bfloat16'"
        )
    return found


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RequestError(f"{path} is not JSON ({_one_line(error)}): download it again") from error
    if not isinstance(found, dict):
        raise RequestError(f"{path} holds a {type(found).__name__}, expected a JSON object")
    return found


def weight_files(directory: Path) -> list[Path]:
    """Return the files that Transformers would load: a directory may hold the weights twice."""
    index, single = directory / _INDEX, directory / _WEIGHTS
    if not index.is_file():
        return [single] if single.is_file() else []
    files = _read_json(index).get("weight_map")
    if not isinstance(files, dict) or not all(isinstance(name, str) for name in files.values()):
        raise RequestError(f"{index} has no weight_map with names of files: download it again")
    return [directory / name for name in sorted(set(files.values()))]


def _check_weights(directory: Path) -> None:
    """Check that every file of weights exists and is as long as its header says."""
    from safetensors import SafetensorError, safe_open

    for path in weight_files(directory) or [directory / _WEIGHTS]:
        if not path.is_file():
            raise RequestError(
                f"{directory} has no {path.relative_to(directory)}: download it, or convert the "
                "weights to safetensors (other formats can run code and are not read)"
            )
        try:
            with safe_open(path, framework="pt"):
                pass
        except (SafetensorError, OSError) as error:
            raise RequestError(
                f"{path} is truncated or no safetensors file ({_one_line(error)}): "
                "download it again"
            ) from error


def _read_weights(
    directory: Path, config: PreTrainedConfig, dtype: torch.dtype | str
) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM

    with explained(f"{directory} cannot be loaded"):
        model: PreTrainedModel
        # A wrong shape would raise a page of text; it is reported below instead.
        model, report = AutoModelForCausalLM.from_pretrained(
            directory,
            config=config,
            dtype=dtype,
            use_safetensors=True,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            **_LOCAL,
        )
    wrong = sorted(report["mismatched_keys"])
    if wrong:
        name, found, expected = wrong[0]
        raise RequestError(
            f"{directory}: weight {name} has shape {list(found)}, expected {list(expected)}"
            f"{_count_others(wrong)}: config.json belongs to another model"
        )
    missing = sorted(report["missing_keys"])
    if missing:
        raise RequestError(
            f"{directory}: weight {missing[0]} is missing{_count_others(missing)}: the checkpoint "
            "is incomplete, or config.json belongs to another model"
        )
    if report["error_msgs"]:
        raise RequestError(f"{directory} cannot be loaded: {_one_line(report['error_msgs'][0])}")
    unused = sorted(report["unexpected_keys"])
    if unused:
        warnings.warn(
            f"{directory}: weight {unused[0]} is not used{_count_others(unused)}: the checkpoint "
            "has parts that a causal language model does not need, or config.json leaves some out",
            stacklevel=4,
        )
    return model


def _count_others(found: list[Any]) -> str:
    return f" (and {len(found) - 1} more)" if len(found) > 1 else ""


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Convert errors of Transformers and others to a RequestError of one line."""
    try:
        yield
    except (PagetileError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise RequestError(f"{what}: {_one_line(error)}") from error


def _one_line(error: object) -> str:
    """Return an error's text in one line, as a sentence where it is a bare one of Python's."""
    text = " ".join(str(error).split()).rstrip(".:")[:300] or type(error).__name__
    if isinstance(error, ZeroDivisionError):
        return f"a number is 0 that must not be ({text})"
    is_key = isinstance(error, KeyError) and " " not in text
    if is_key or isinstance(error, (AttributeError, IndexError, TypeError)):
        kind = type(error).__name__
        return f"a value is missing, unknown or of another type than expected ({kind}: {text})"
    return text


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence Transformers' warnings and progress bars; problems are raised as errors."""
    from transformers.utils import logging

    verbosity, has_bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if has_bar:
            logging.enable_progress_bar()
