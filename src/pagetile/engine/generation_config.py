"""Sampling defaults that a checkpoint recommends in its generation_config.json."""

from __future__ import annotations

import json
import os
from pathlib import Path

from ..errors import RequestError
from .sampling_params import SamplingParams

# Names in generation_config.json and in SamplingParams: those that vLLM reads.
_SAMPLING = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


def sampling_defaults(model: str | os.PathLike[str] | None) -> dict[str, float]:
    """Sampling parameters that a checkpoint recommends in its generation_config.json.

    Returns:
        Values by the names of ``SamplingParams``; empty where the checkpoint has no such file.

    Raises:
        RequestError: The file is not a JSON object, or a value is wrong.
    """
    if model is None:
        return {}
    path = Path(model) / "generation_config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError) as error:
        raise RequestError(f"{path} is not JSON ({error}): mend or remove it") from error
    if not isinstance(config, dict):
        raise RequestError(f"{path} is a JSON {type(config).__name__}, expected an object")
    found = {
        name: config[configured]
        for configured, name in _SAMPLING.items()
        if config.get(configured) is not None
    }
    try:
        SamplingParams(**found)
    except RequestError as error:
        raise RequestError(f"{path}: {error}; mend it, or do not use it") from error
    return found
