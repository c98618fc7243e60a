"""``pagetile serve``: an OpenAI-compatible server, with a page that shows the cache."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console

from ..errors import RequestError, plural
from .options import (
    MODEL,
    BlockSize,
    CacheDtype,
    Device,
    Dtype,
    MaxModelLen,
    MaxNumSeqs,
    NoGenerationConfig,
    NoPrefixCaching,
    NumBlocks,
    NumSpeculativeTokens,
    Speculative,
    flag,
    option,
)
from .run import load

if TYPE_CHECKING:
    from ..engine.async_llm import AsyncLLM
    from ..server import ServerConfig

EXAMPLES = """
[bold]Examples[/bold]
  pagetile serve
  pagetile serve my-checkpoint --port 8080
  pagetile serve --demo-traffic      (then open http://127.0.0.1:8000/pages)
  curl http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' \\
    -d '{"prompt": "def add(a, b):", "max_tokens": 32}'
"""

HTTP = "Server"


def serve(
    model: Annotated[
        Path | None,
        typer.Argument(
            metavar="MODEL",
            help="A Hugging Face checkpoint. Without it, the small model of Python code that "
            "comes along.",
        ),
    ] = None,
    host: Annotated[str, option(HTTP, "ADDRESS", "Where to listen.")] = "127.0.0.1",
    port: Annotated[int, option(HTTP, "N", "Port; 0 takes a free one.", min=0, max=65535)] = 8000,
    served_model_name: Annotated[
        list[str] | None,
        option(
            HTTP, "NAME", "Name of the model in requests. May be repeated. Without it, its folder."
        ),
    ] = None,
    api_key: Annotated[
        list[str] | None,
        option(
            HTTP,
            "KEY",
            "Serve only clients that send this key. May be repeated. Also read from the "
            "environment's PAGETILE_API_KEY.",
        ),
    ] = None,
    api_key_file: Annotated[
        Path | None, option(HTTP, "FILE", "API keys, one on each line; # begins a comment.")
    ] = None,
    cors_origin: Annotated[
        list[str] | None,
        option(HTTP, "ORIGIN", "Let pages of this origin call the server. None by default."),
    ] = None,
    chat_template: Annotated[
        str | None,
        option(HTTP, "FILE", "A Jinja template to replace the checkpoint's; or chatml, plain."),
    ] = None,
    trust_request_chat_template: Annotated[
        bool, flag(HTTP, "--trust-request-chat-template", "Accept chat templates in requests.")
    ] = False,
    tool_call_parser: Annotated[
        Literal["auto", "hermes", "llama3_json", "none"],
        option(HTTP, "NAME", "hermes, llama3_json, none; auto goes by the template."),
    ] = "auto",
    no_generation_config: NoGenerationConfig = False,
    max_queued: Annotated[
        int, option(HTTP, "N", "Sequences that may wait; beyond, requests get a 503.", min=0)
    ] = 1024,
    max_body_bytes: Annotated[
        int, option(HTTP, "N", "The largest body of a request.", min=1)
    ] = 8_388_608,
    drain_seconds: Annotated[
        float, option(HTTP, "S", "How long running requests may take after SIGTERM.")
    ] = 30.0,
    show_text: Annotated[
        bool, flag(HTTP, "--show-text", "Show prompts and outputs on /pages.")
    ] = False,
    log_format: Annotated[Literal["text", "json"], option(HTTP, "FORM", "text or json.")] = "text",
    log_prompts: Annotated[
        bool, flag(HTTP, "--log-prompts", "Log each prompt's text, at most 2000 characters.")
    ] = False,
    quiet: Annotated[bool, flag(HTTP, "--quiet", "Log nothing.")] = False,
    demo_traffic: Annotated[
        bool, flag(HTTP, "--demo-traffic", "Send demo requests to itself, to watch on /pages.")
    ] = False,
    dtype: Dtype = "auto",
    kv_cache_dtype: CacheDtype = "auto",
    device: Device = None,
    block_size: BlockSize = 16,
    num_blocks: NumBlocks = None,
    memory_fraction: Annotated[
        float,
        option(
            MODEL,
            "SHARE",
            "Largest share of free memory for the cache. Also --gpu-memory-utilization.",
            "--memory-fraction",
            "--gpu-memory-utilization",
        ),
    ] = 0.9,
    max_num_seqs: MaxNumSeqs = 128,
    max_num_batched_tokens: Annotated[
        int | None,
        option(
            MODEL,
            "N",
            "The most tokens of one step; longer prompts are cut. Without it 2048, on a GPU 8192.",
        ),
    ] = None,
    max_model_len: MaxModelLen = None,
    no_prefix_caching: NoPrefixCaching = False,
    speculative: Speculative = None,
    num_speculative_tokens: NumSpeculativeTokens = None,
    seed: Annotated[int, option(MODEL, "N", "Seeds requests that come without a seed.")] = 0,
) -> None:
    """Serve a model over HTTP, as the OpenAI API does.

    Point any OpenAI client at it: base_url "http://127.0.0.1:8000/v1". /docs
    lists every path and field, /pages shows the cache live, /metrics is for
    Prometheus. SIGTERM and Ctrl-C let running requests finish.
    """
    import asyncio

    if not 0 <= drain_seconds < float("inf"):
        raise RequestError(f"--drain-seconds {drain_seconds:g}: expected 0 or more seconds")
    if "" in (served_model_name or ()):
        raise RequestError("--served-model-name is empty: give a name, or leave it out")
    for origin in cors_origin or ():
        if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/]+", origin):
            raise RequestError(
                f"--cors-origin {origin}: expected an origin such as https://example.com, without "
                "a path, or *"
            )
    from ..engine.async_llm import AsyncLLM
    from ..engine.generation_config import sampling_defaults
    from ..server import Limits, ServerConfig, create_app
    from ..server import serve as run_server
    from ..server.config import model_name, read_keys
    from ..server.demo_traffic import DemoTraffic
    from ..server.logs import log
    from ..server.run import check_address
    from ..server.templates import read_template

    check_address(host, port)  # before the model is loaded, which may take minutes
    log.as_json, log.is_on = log_format == "json", not quiet
    config = ServerConfig(
        model_names=tuple(served_model_name or (model_name(model),)),
        api_keys=read_keys(api_key or (), api_key_file),
        cors_origins=tuple(cors_origin or ()),
        chat_template=read_template(chat_template, model),
        trust_request_chat_template=trust_request_chat_template,
        tool_call_parser=tool_call_parser,
        sampling_defaults={} if no_generation_config else sampling_defaults(model),
        show_text=show_text,
        log_prompts=log_prompts,
        limits=Limits(body_bytes=max_body_bytes),
    )
    console = Console(stderr=True, highlight=False)
    with console.status("Loading the model (and compiling kernels, the first time)"):
        loaded = load(
            model=model,
            dtype=dtype,
            kv_cache_dtype=kv_cache_dtype,
            device=device,
            block_size=block_size,
            num_blocks=num_blocks,
            memory_fraction=memory_fraction,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            enable_prefix_caching=not no_prefix_caching,
            speculative=speculative,
            num_speculative_tokens=num_speculative_tokens,
            generation_config="vllm",  # every request brings its own, with these defaults
            seed=seed,
        )
    llm = AsyncLLM(loaded, max_queued_seqs=max_queued)

    def announce(url: str) -> None:
        console.print(_summary(llm, config, url), soft_wrap=True)

    async def run() -> int:
        app = create_app(llm, config)
        traffic = DemoTraffic(llm).run if demo_traffic else None
        return await run_server(
            app,
            llm,
            host=host,
            port=port,
            drain_seconds=drain_seconds,
            on_start=announce,
            background=traffic,
        )

    code = asyncio.run(run())
    if code:
        raise typer.Exit(code)


def _summary(llm: AsyncLLM, config: ServerConfig, url: str) -> str:
    """Return the line printed at the start: model, address, and how many tokens fit."""
    engine = llm.engine
    tokens = engine.cache.num_blocks * engine.cache.block_size
    return (
        f"pagetile: {config.model_names[0]} at {url}/v1 on {engine.model.device}; the cache holds "
        f"{tokens:,} tokens ({plural(engine.cache.num_blocks, 'block')} of "
        f"{engine.cache.block_size}), "
        f"a sequence at most {engine.max_model_len:,}; pages at {url}/pages"
    )
