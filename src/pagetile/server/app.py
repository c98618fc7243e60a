"""The ASGI application: routes, errors, keys and limits around one ``AsyncLLM``."""

from __future__ import annotations

from fastapi import FastAPI
from pydantic import BaseModel
from starlette.middleware.cors import CORSMiddleware

from ..engine.async_llm import AsyncLLM
from ..version import find_version
from .body import add_openapi
from .config import ServerConfig
from .errors import add_handlers
from .middleware import Gate
from .routes import generation, info, pages, tokens
from .schemas.chat import ChatRequest
from .schemas.completions import CompletionRequest, DetokenizeRequest, TokenizeRequest
from .schemas.responses import ResponsesRequest
from .state import Server


def create_app(llm: AsyncLLM, config: ServerConfig | None = None) -> FastAPI:
    """An ASGI application that serves a model.

    Examples:
        >>> app = create_app(AsyncLLM.load(num_blocks=64))
        >>> app.title
        'pagetile'
    """
    config = config or ServerConfig()
    app = FastAPI(
        title="pagetile",
        version=find_version(),
        description="OpenAI-compatible text generation over a paged KV cache.",
    )
    server = app.state.server = Server(llm, config)
    for routes in (generation, tokens, info, pages):
        app.include_router(routes.router)
    add_handlers(app)
    bodies: list[type[BaseModel]] = [
        CompletionRequest,
        ChatRequest,
        ResponsesRequest,
        TokenizeRequest,
        DetokenizeRequest,
    ]
    add_openapi(app, bodies, needs_key=bool(config.api_keys))
    app.add_middleware(Gate, keys=server.keys, limits=config.limits)
    if config.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(config.cors_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["Authorization", "Content-Type", "X-Request-Id"],
        )
    return app
