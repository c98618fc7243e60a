"""Transformers models over a paged cache: loaded, checked against their own code, and fused."""

from .forward_batch import ForwardBatch
from .loading import load_tokenizer
from .paged_model import PagedModel, load_model

__all__ = ["ForwardBatch", "PagedModel", "load_model", "load_tokenizer"]
