"""``pagetile generate``: continues prompts, and reports the use of the cache."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from ..errors import RequestError
from .options import (
    BlockSize,
    CacheDtype,
    Device,
    Dtype,
    MaxModelLen,
    MaxNumSeqs,
    Model,
    NoGenerationConfig,
    NoPrefixCaching,
    NumBlocks,
    NumSpeculativeTokens,
    Speculative,
    flag,
    option,
)
from .output import print_in_order, stream_one
from .prompts import read_prompts
from .run import Run, cache_report, load

EXAMPLES = """
[bold]Examples[/bold]
  pagetile generate "def fibonacci(n):" --temperature 0.7
  pagetile generate --file draft.py --temperature 0 > longer.py
  git diff | pagetile generate --model my-checkpoint --stop END
  pagetile generate "import os" --n 3 --show-pages
"""

SAMPLING = "Sampling"
MAX_TOKENS = 128


def generate(
    prompts: Annotated[
        list[str] | None,
        typer.Argument(metavar="PROMPT", help="Text to continue. Several run at the same time."),
    ] = None,
    file: Annotated[
        Path | None,
        option(None, "FILE", "Continue a file; all of it is one prompt.", "--file", "-f"),
    ] = None,
    chat: Annotated[
        bool,
        flag(None, "--chat", "Take each prompt as a user's message, by the model's chat template."),
    ] = False,
    no_echo: Annotated[
        bool, flag(None, "--no-echo", "Print the new text without the prompt.")
    ] = False,
    show_pages: Annotated[
        bool,
        flag(
            None,
            "--show-pages",
            "Draw which sequence held which block, at the step with most blocks in use.",
        ),
    ] = False,
    n: Annotated[int, option(SAMPLING, "N", "Samples of each prompt.", "--n", "-n")] = 1,
    max_tokens: Annotated[
        int | None,
        option(SAMPLING, "N", "Most new tokens. Without it, the checkpoint's own default, or 128."),
    ] = None,
    temperature: Annotated[
        float | None,
        option(
            SAMPLING, "X", "Sampling temperature: 0 is greedy, 1 the model's own probabilities."
        ),
    ] = None,
    top_p: Annotated[
        float | None,
        option(SAMPLING, "X", "Sample from the likeliest tokens whose probabilities sum to this."),
    ] = None,
    top_k: Annotated[
        int | None,
        option(SAMPLING, "N", "Sample from this many of the likeliest tokens; 0 is all."),
    ] = None,
    min_p: Annotated[
        float | None,
        option(SAMPLING, "X", "Drop tokens less likely than this times the likeliest."),
    ] = None,
    repetition_penalty: Annotated[
        float | None, option(SAMPLING, "X", "Above 1, make tokens that have appeared less likely.")
    ] = None,
    seed: Annotated[
        int | None, option(SAMPLING, "N", "Seed of sampling: the same seed gives the same text.")
    ] = None,
    stop: Annotated[
        list[str] | None,
        option(SAMPLING, "TEXT", "Stop before this text. May be given several times."),
    ] = None,
    ignore_eos: Annotated[
        bool, flag(SAMPLING, "--ignore-eos", "Continue after the model's end token.")
    ] = False,
    no_generation_config: NoGenerationConfig = False,
    model: Model = None,
    dtype: Dtype = "auto",
    kv_cache_dtype: CacheDtype = "auto",
    device: Device = None,
    block_size: BlockSize = 16,
    num_blocks: NumBlocks = None,
    max_num_seqs: MaxNumSeqs = 128,
    max_model_len: MaxModelLen = None,
    no_prefix_caching: NoPrefixCaching = False,
    speculative: Speculative = None,
    num_speculative_tokens: NumSpeculativeTokens = None,
) -> None:
    """Continue text.

    A single continuation is printed as it is computed, several one after
    another when they are done. A summary of the cache goes to stderr.

    Without PROMPT and --file the prompt is read from a pipe; without a pipe
    it is two lines of Python. The last line break of a file or a pipe is
    dropped.

    Defaults of the sampling options are those of the checkpoint's
    generation_config.json, as with LLM and the server; without one,
    temperature 1 and all tokens.
    """
    from ..engine.chat import render
    from ..engine.generation_config import sampling_defaults
    from ..engine.sampling_params import SamplingParams

    texts = read_prompts(prompts or (), file)
    given: dict[str, Any] = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
    }
    recommended = {} if no_generation_config else sampling_defaults(model)
    values: dict[str, Any] = {"max_tokens": MAX_TOKENS, **recommended}
    values |= {name: value for name, value in given.items() if value is not None}
    params = SamplingParams(n=n, seed=seed, stop=stop or (), ignore_eos=ignore_eos, **values)
    console = Console(stderr=True, highlight=False)
    with console.status("Loading the model (and compiling kernels, the first time)"):
        llm = load(
            model=model,
            dtype=dtype,
            kv_cache_dtype=kv_cache_dtype,
            device=device,
            block_size=block_size,
            num_blocks=num_blocks,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            enable_prefix_caching=not no_prefix_caching,
            speculative=speculative,
            num_speculative_tokens=num_speculative_tokens,
            generation_config="vllm",  # the parameters above are given with every prompt
        )
    if chat and llm.engine.tokenizer.chat_template is None:
        raise RequestError(
            "--chat: this model's tokenizer has no chat template. Leave out --chat, or give one to "
            "pagetile chat: --chat-template plain"
        )
    spoken = [[{"role": "user", "content": text}] for text in texts]
    continued = render(llm.engine.tokenizer, spoken) if chat else texts
    deltas = llm.stream(continued, params)  # refuses what cannot be served
    run = Run(llm.engine, texts, n, max_tokens=int(values["max_tokens"]), watch=show_pages)
    deltas = run.measure(deltas)
    echo = not (no_echo or chat)
    if len(run.keys) == 1:
        stream_one(deltas, texts[0] if echo else "", console)
    else:
        print_in_order(deltas, run, echo=echo, show_bar=console.is_terminal)
    if console.is_terminal:
        console.print()
    if run.page_map is not None:
        console.print(f"Step {run.peak_step} of {run.num_steps}, when most blocks were in use:")
        console.print(run.page_map)
        console.print()
    console.print(cache_report(llm.engine, run))
    if run.errors:
        raise RequestError("; ".join(run.errors))
