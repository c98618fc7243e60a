"""An OpenAI-compatible HTTP server over ``AsyncLLM``, with metrics and a live map of the pages."""

from .app import create_app
from .config import Limits, ServerConfig
from .run import serve

__all__ = ["Limits", "ServerConfig", "create_app", "serve"]
