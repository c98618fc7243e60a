"""How a Transformers model is fed: exact, or refused."""

from .forward_batch import ForwardBatch
from .loading import load_tokenizer
from .paged_model import PagedModel, load_model

__all__ = ["ForwardBatch", "PagedModel", "load_model", "load_tokenizer"]
