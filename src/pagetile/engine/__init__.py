"""The engine: requests in, tokens out, over the paged cache."""

from .core import Engine
from .llm import LLM
from .outputs import CompletionOutput, Delta, RequestOutput
from .sampling_params import SamplingParams
from .structured_outputs import StructuredOutputsParams

__all__ = [
    "LLM",
    "CompletionOutput",
    "Delta",
    "Engine",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
]
