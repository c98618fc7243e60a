"""Workloads of generation by one engine: prompts, and the number of new tokens of each.

``python -m benchmarks.workload_n`` runs workload N and small batches on one GPU and prints JSON:
256 prompts of 100 to 1024 random tokens, 100 to 1024 new tokens each, temperature 0.6, over a model
of Qwen3-0.6B's sizes with random weights.

``chats`` and ``long`` are two more workloads, whose requests arrive over time: many short chats, of
which a third share one of a few system prompts; and a few prompts of tens of thousands of tokens
among short chats.

``shared`` is one long prompt with many samples, whose blocks are read once a step, and again with
every sequence reading them itself.

``n4``, ``stop``, ``logprobs``, ``top_p`` and ``penalty`` are N with half as many new tokens and one
change, in turns with the same without it; the metric is the share of its tokens/s. ``fp8`` is N by
an engine with an 8-bit cache, against N in the same process. ``long`` has an engine of its own.

``llama`` is another model: decode steps of Llama-8B's sizes, as a share of the lower bound that the
memory bandwidth gives.

Everything is repeated five times (``NUM_TURNS``); the output has the median and all repeats.
``--brief`` runs a little of everything once, to compile kernels: its figures are meaningless.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from pagetile import LLM, SamplingParams

from .generators import LLAMA, QWEN3
from .gpu_timing import time_in_turns
from .report import REPEATS

Requests = list[tuple[list[int], int]]
"""Prompts as token ids, and the number of new tokens of each."""

NEVER = "never said"
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "n4": ("N's first quarter of prompts with half the new tokens and n=4", {"n": 4}),
    "stop": (
        "N with half the new tokens and a stop string, so with text",
        {"stop": [NEVER], "detokenize": True},
    ),
    "logprobs": ("N with half the new tokens and log-probabilities", {"logprobs": 1}),
    "top_p": ("N with half the new tokens and top_p=0.9", {"top_p": 0.9}),
    "penalty": ("N with half the new tokens and presence_penalty=0.5", {"presence_penalty": 0.5}),
}
"""N with other sampling parameters: a description, and the parameters."""
FP8 = {"kv_cache_dtype": "fp8"}
NUM_TURNS = 5
LONG_MODEL_LEN = 40960
CASES = {
    "n": "N", "small": "ms a token", "host": "host ms a step", "profile": "profile",
    "shared": "shared", "chats": "chats", **{name: name for name in VARIANTS}, "fp8": "fp8",
    "long": "long", "llama": "llama",
}  # fmt: skip
"""Parts, and the names of what each prints."""


def draw_n(num_prompts: int = 256, vocab_size: int = 10000) -> Requests:
    """Workload N: prompts are drawn first, lengths of outputs after all of them."""
    rng = random.Random(0)
    prompts = [
        [rng.randint(0, vocab_size) for _ in range(rng.randint(100, 1024))]
        for _ in range(num_prompts)
    ]
    return [(prompt, rng.randint(100, 1024)) for prompt in prompts]


class Arrival(NamedTuple):
    """A request of a workload whose requests arrive over time."""

    seconds: float
    """Since the start."""
    prompt: list[int]
    num_new: int


def draw_chats(
    num_chats: int = 300,
    *,
    per_second: float = 60.0,
    num_systems: int = 2,
    system_lens: tuple[int, int] = (1000, 2000),
    lens: tuple[int, int] = (20, 200),
    vocab_size: int = 10000,
    seed: int = 31,
) -> list[Arrival]:
    """Many short chats, of which a third begin with one of a few system prompts.

    Args:
        num_chats: Number of chats.
        per_second: Arrivals a second, on average.
        num_systems: Number of system prompts.
        system_lens: Fewest and most tokens of a system prompt.
        lens: Fewest and most tokens of a user's message, and of the answer.
        vocab_size: The model's, or less.
        seed: Seed of all random numbers.
    """
    rng = random.Random(seed)
    systems = [_draw(rng, system_lens, vocab_size) for _ in range(num_systems)]
    now, arrivals = 0.0, []
    for _ in range(num_chats):
        head = rng.choice(systems) if rng.random() < 1 / 3 else []
        arrivals.append(Arrival(now, head + _draw(rng, lens, vocab_size), rng.randint(*lens)))
        now += rng.expovariate(per_second)
    return arrivals


def draw_long(
    num_long: int = 3,
    num_chats: int = 100,
    *,
    per_second: float = 20.0,
    long_lens: tuple[int, int] = (20_000, 35_000),
    lens: tuple[int, int] = (20, 200),
    vocab_size: int = 10000,
    seed: int = 32,
) -> list[Arrival]:
    """A few long prompts, evenly spread, among short chats."""
    rng = random.Random(seed)
    now, arrivals = 0.0, []
    for number in range(num_chats):
        arrivals.append(Arrival(now, _draw(rng, lens, vocab_size), rng.randint(*lens)))
        if num_long * number // num_chats != num_long * (number + 1) // num_chats:
            arrivals.append(Arrival(now, _draw(rng, long_lens, vocab_size), rng.randint(*lens)))
        now += rng.expovariate(per_second)
    return arrivals


def _draw(rng: random.Random, lens: tuple[int, int], vocab_size: int) -> list[int]:
    return [rng.randrange(vocab_size) for _ in range(rng.randint(*lens))]


def serve(llm: LLM, arrivals: Sequence[Arrival]) -> dict[str, float]:
    """Stream the answers to requests as they arrive.

    Returns:
        Tokens a second; median and 99th percentile, in milliseconds, of the time from a request's
        arrival to its first token, and between two of its tokens; the share of prompt tokens that
        were in the prefix cache.
    """
    engine, waiting = llm.engine, deque(sorted(arrivals))
    counts = engine.counts
    found, asked = counts.cached_tokens, counts.prompt_tokens
    last: dict[Hashable, float] = {}  # when a request's last token came, or when it arrived
    is_first: set[Hashable] = set()
    first: list[float] = []
    between: list[float] = []
    num_tokens = 0
    start = time.perf_counter()
    while waiting or engine.has_unfinished:
        now = time.perf_counter() - start
        while waiting and waiting[0].seconds <= now:
            arrival = waiting.popleft()
            params = SamplingParams(max_tokens=arrival.num_new, temperature=0.6, ignore_eos=True)
            request_id = engine.add_request(arrival.prompt, params, stream=True)
            last[request_id] = arrival.seconds
            is_first.add(request_id)
        if not engine.has_unfinished:
            time.sleep(max(0.0, waiting[0].seconds - now))
            continue
        deltas = engine.step()
        now = time.perf_counter() - start
        for delta in deltas:
            times = first if delta.request_id in is_first else between
            is_first.discard(delta.request_id)
            times.append(now - last[delta.request_id])
            last[delta.request_id] = now
            if delta.finish_reason is not None:
                engine.take_output(delta.request_id)
        num_tokens += len(deltas)
    return {
        "tokens/s": num_tokens / now,
        **_percentiles("ms to the first token", first),
        **_percentiles("ms between tokens", between),
        "cached": (counts.cached_tokens - found) / max(1, counts.prompt_tokens - asked),
    }


def _percentiles(name: str, seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    return {
        f"{name}, {label}": 1e3 * ordered[min(len(ordered) - 1, int(part * len(ordered)))]
        for label, part in (("median", 0.5), ("p99", 0.99))
    }


def generate(llm: LLM, requests: Requests, **options: Any) -> float:
    """Seconds that an engine takes for all requests."""
    options = {"temperature": 0.6, "ignore_eos": True, "detokenize": False, **options}
    params = [SamplingParams(max_tokens=n, **options) for _, n in requests]
    start = time.perf_counter()
    llm.generate([prompt for prompt, _ in requests], params, use_tqdm=False)
    return time.perf_counter() - start


def make_tokenizer(vocab_size: int) -> Any:
    """A tokenizer with a word for every token id: stop strings are searched for in text."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(vocab_size)}, unk_token="w0"))
    words.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=words)


def _median(name: str, repeats: Sequence[float]) -> dict[str, Any]:
    """The median of a metric, and all its repeats, as records keep them."""
    kept = [float(f"{value:.5g}") for value in repeats]
    return {name: statistics.median(repeats), name + REPEATS: kept}


def time_n(llm: LLM, requests: Requests, turns: int = NUM_TURNS) -> dict[str, Any]:
    """Tokens a second of the requests, without a prefix cache, after a run that may compile."""
    total = sum(n for _, n in requests)
    rates = []
    for _ in range(1 + turns):
        llm.reset_prefix_cache()  # or a run would reuse the prompts of the one before
        rates.append(total / generate(llm, requests))
    return {"tokens": total, "tokens/s, first run": rates[0], **_median("tokens/s", rates[1:])}


def time_variants(
    llm: LLM, requests: Requests, names: Sequence[str], turns: int = NUM_TURNS
) -> dict[str, dict[str, Any]]:
    """Tokens a second of variants, and of N in turns with them, with half as many new tokens.

    ``share of N`` is the median over turns.
    """
    half = [(prompt, max(1, n // 2)) for prompt, n in requests]
    rates: dict[str, list[float]] = {name: [] for name in ("", *names)}
    totals: dict[str, int] = {}
    for turn in range(turns):
        for name in random.Random(turn).sample(list(rates), len(rates)):
            options = VARIANTS[name][1] if name else {}
            copies = options.get("n", 1)
            some = half[: max(1, len(half) // copies)]
            totals[name] = copies * sum(n for _, n in some)
            llm.reset_prefix_cache()
            rates[name].append(totals[name] / generate(llm, some, **options))
    return {
        name: {
            "tokens": totals[name],
            **_median("tokens/s", rates[name]),
            **_median("tokens/s of N", rates[""]),
            **_median("share of N", [a / b for a, b in zip(rates[name], rates[""], strict=True)]),
        }
        for name in names
    }


def time_shared(
    llm: LLM, num_prompt: int, num_new: int = 256, turns: int = NUM_TURNS
) -> dict[str, Any]:
    """Tokens a second of as many samples of one prompt as run at the same time, up to 64.

    Once with the prompt's blocks read once a step for all samples, and once with each sample
    reading them, in turns, after one turn that may compile.
    """
    rng, scheduler = random.Random(7), llm.engine.scheduler
    n = min(64, scheduler.max_num_seqs)
    rates: dict[bool, list[float]] = {True: [], False: []}
    grouper = scheduler.grouper
    try:
        for turn in range(2 * (1 + turns)):
            prompt = _draw(rng, (num_prompt, num_prompt), min(10000, llm.engine.model.vocab_size))
            scheduler.grouper = grouper if turn % 2 == 0 else None
            seconds = generate(llm, [(prompt, num_new)], n=n)
            rates[turn % 2 == 0].append(n * num_new / seconds)
    finally:
        scheduler.grouper = grouper
    shared, apart = (rates[kind][1:] for kind in (True, False))
    return {
        **_median("tokens/s", shared),
        **_median("tokens/s, read by each", apart),
        **_median("x read by each", [a / b for a, b in zip(shared, apart, strict=True)]),
    }


def time_per_token(
    llm: LLM, num_seqs: int, num_prompt: int = 64, num_new: int = 256, turns: int = NUM_TURNS
) -> list[float]:
    """Milliseconds between two tokens of each of ``num_seqs`` sequences, greedy, in each turn.

    It is a long run's time less a short one's. Both compute their prompts, so the long run must not
    reuse the short one's cache.
    """
    found = []
    for turn in range(turns):
        rng = random.Random(turn * 1000 + num_seqs)
        prompts = [[rng.randrange(10000) for _ in range(num_prompt)] for _ in range(num_seqs)]
        seconds = []
        for n in (8, 8 + num_new):
            llm.reset_prefix_cache()
            seconds.append(generate(llm, [(prompt, n) for prompt in prompts], temperature=0.0))
        found.append(1e3 * (seconds[1] - seconds[0]) / num_new)
    return found


def shares_of_lower_bound(
    llm: LLM, num_weight_bytes: int, num_new: int = 64, turns: int = NUM_TURNS
) -> dict[str, Any]:
    """Shortest possible time of decode steps of 1, 8 and 64 sequences, as a share of the measured.

    Each sequence has a prompt of 512 tokens. A step has to read all weights but the embeddings,
    and the keys and values of all sequences; the GPU's rate is that of a sum over 4 GiB.
    """
    cache = llm.engine.cache
    memory = torch.zeros(1 << 30, device="cuda")
    seconds = time_in_turns({"sum": memory.sum}, "cuda", clean=True)["sum"].median
    read_rate = memory.nbytes / seconds
    del memory
    found: dict[str, Any] = {"GB/s of a sum": read_rate / 1e9}
    for num_seqs in (1, 8, 64):
        ms = time_per_token(llm, num_seqs, num_prompt=512, num_new=num_new, turns=turns)
        num_keys = num_seqs * (512 + 8 + num_new / 2)
        floor = (num_weight_bytes + num_keys * cache.num_bytes / cache.num_tokens) / read_rate
        found |= _median(f"ms a token, {num_seqs}", ms)
        found |= _median(f"share of the floor, {num_seqs}", [1e3 * floor / each for each in ms])
    return found


def count_weight_bytes(module: torch.nn.Module) -> int:
    """Bytes of a model's parameters without the embedding table, of which a step reads few rows."""
    embeddings: torch.nn.Module = module.get_input_embeddings()  # type: ignore[operator]
    return sum(p.nbytes for p in set(module.parameters()) - set(embeddings.parameters()))


def host_time_per_step(
    llm: LLM, num_seqs: int, num_steps: int = 40, turns: int = NUM_TURNS
) -> list[float]:
    """Milliseconds a decode step that the host works, without its waits, in each turn."""
    engine = llm.engine
    rng = random.Random(5)
    num_first = 60  # steps with prompts, and steps that allocate memory
    params = SamplingParams(
        max_tokens=turns * num_steps + num_first + 40, temperature=0.6, ignore_eos=True
    )
    ids = [
        engine.add_request([rng.randrange(10000) for _ in range(64)], params)
        for _ in range(num_seqs)
    ]
    for _ in range(num_first):
        engine.step()
    waited, found = 0.0, []
    wait = torch.cuda.Event.synchronize

    def timed(event: torch.cuda.Event) -> None:
        nonlocal waited
        start = time.perf_counter()
        wait(event)
        waited += time.perf_counter() - start

    torch.cuda.Event.synchronize = timed  # type: ignore[method-assign, assignment]
    try:
        for _ in range(turns):
            waited, start = 0.0, time.perf_counter()
            for _ in range(num_steps):
                engine.step()
            found.append(1e3 * (time.perf_counter() - start - waited) / num_steps)
    finally:
        torch.cuda.Event.synchronize = wait  # type: ignore[method-assign]
    for request_id in ids:
        engine.abort(request_id)
        engine.take_output(request_id)
    return found


def profile(llm: LLM, requests: Requests, skip: float = 1.0) -> dict[str, Any]:
    """Kernels by time, and the share of time that the GPU is busy, after ``skip`` seconds."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as torch_profile

    engine = llm.engine
    for prompt, n in requests:
        engine.add_request(prompt, SamplingParams(max_tokens=n, temperature=0.6, ignore_eos=True))
    start = time.perf_counter()
    while time.perf_counter() - start < skip:
        engine.step()
    num_keys = 0
    with torch_profile(activities=[ProfilerActivity.CUDA]) as prof:
        begin = time.perf_counter()
        for _ in range(60):
            num_keys += sum(s.num_computed for s in engine.scheduler.running)
            engine.step()
        torch.cuda.synchronize()
        seconds = time.perf_counter() - begin
    for request_id in list(engine._requests):
        engine.abort(request_id)
        engine.take_output(request_id)
    rows = [(e.key, e.self_device_time_total, e.count) for e in prof.key_averages()]
    rows.sort(key=lambda row: -row[1])
    ranges = [e.time_range for e in prof.events() if e.device_type.name == "CUDA"]
    busy = count_busy((r.start, r.end) for r in ranges) / 1e6
    num_bytes = num_keys * engine.cache.num_bytes / engine.cache.num_tokens
    attention = sum(t for key, t, _ in rows if "decode_kernel" in key) / 1e6
    return {
        "busy": busy / seconds,
        "ms a step": 1e3 * seconds / 60,
        "GB of keys and values a step": num_bytes / 60 / 1e9,
        "GB/s of attention": num_bytes / attention / 1e9 if attention else None,
        "kernels a step": sum(n for *_, n in rows) / 60,
        "kernels": [(key[:70], round(t / 60, 1), round(n / 60, 1)) for key, t, n in rows[:25]],
    }


def count_busy(spans: Iterable[tuple[float, float]]) -> float:
    """The time that overlapping spans cover; the sum of kernels' times would count overlap twice.

    Examples:
        >>> count_busy([(0.0, 2.0), (1.0, 3.0), (5.0, 6.0)])
        4.0
    """
    covered, last = 0.0, float("-inf")
    for start, end in sorted(spans):
        covered += max(0.0, end - max(start, last))
        last = max(last, end)
    return covered


def serve_in_turns(
    llm: LLM, draw: Callable[..., list[Arrival]], turns: int = NUM_TURNS, **sizes: Any
) -> dict[str, Any]:
    """``serve`` with other requests in every turn and an empty cache; medians over turns."""
    found = []
    for turn in range(turns):
        llm.reset_prefix_cache()
        found.append(serve(llm, draw(seed=31 + turn, **sizes)))
    return {
        key: value
        for name in found[0]
        for key, value in _median(name, [each[name] for each in found]).items()
    }


def run_parts(
    parts: Sequence[str], load: Callable[..., LLM], requests: Requests, *, brief: bool = False
) -> None:
    """Run parts and print one JSON object a line.

    Args:
        parts: Names of parts.
        load: Makes an engine from options of ``LLM`` besides its own, ``model`` among them.
        requests: The requests of N.
        brief: Whether to run a little of everything, to compile kernels.
    """
    turns = 1 if brief else NUM_TURNS
    if brief:
        requests = [(prompt[:16], 4) for prompt, _ in requests]
    base = 0.0
    if any(part not in ("long", "llama") for part in parts):
        base = _run_on_one_engine(parts, load, requests, turns, brief)
        _free_memory()
    if "fp8" in parts:
        found = time_n(load(**FP8), requests, turns)
        _print(
            "fp8", "N with kv_cache_dtype=fp8", **found, **{"share of N": found["tokens/s"] / base}
        )
        _free_memory()
    if "long" in parts:
        sizes: dict[str, Any] = {"num_long": 1, "num_chats": 4, "per_second": 1e3} if brief else {}
        found = serve_in_turns(load(max_model_len=LONG_MODEL_LEN), draw_long, turns, **sizes)
        _print("long", "long", **found)
        _free_memory()
    if "llama" in parts:
        module = LLAMA.load(torch.bfloat16, "cuda")
        # The GPU's rate is measured in the same process: 16 GB of weights and 0.7 of the rest of
        # 80 GB leave 18 GB for a sum over 4 GiB, for graphs and for prompts.
        llm = load(model=module, memory_fraction=0.2 if brief else 0.7)
        found = shares_of_lower_bound(llm, count_weight_bytes(module), 8 if brief else 64, turns)
        bounds = {"1": 0.88, "8": 0.88, "64": 0.8}
        targets = [(f"share of the floor, {n}", bound, ">=") for n, bound in bounds.items()]
        _print("llama", "Llama-8B's sizes, prompts of 512", targets=targets, **found)


def _run_on_one_engine(
    parts: Sequence[str], load: Callable[..., LLM], requests: Requests, turns: int, brief: bool
) -> float:
    """Run the parts that share an engine; return N's tokens a second, if a part needs them."""
    start = time.perf_counter()
    llm = load()
    _print("start", "loading and warming up", seconds=time.perf_counter() - start)
    base = 0.0
    if "n" in parts or "fp8" in parts:
        found = time_n(llm, requests, turns)
        base = found["tokens/s"]
        _print("N", "N", targets=[("tokens/s", 30000, ">=")], **found)
    if "small" in parts:
        found = {}
        for n in (1, 8, 64):
            found |= _median(str(n), time_per_token(llm, n, 64, 8 if brief else 256, turns))
        bounds = {"1": 0.7, "8": 0.8, "64": 1.25}
        targets = [(name, bound, "<=") for name, bound in bounds.items()]
        _print("ms a token", "ms a token, by sequences", targets=targets, **found)
    if "host" in parts:
        found = {}
        for n in (1, 64, 256):
            found |= _median(str(n), host_time_per_step(llm, n, 4 if brief else 40, turns))
        _print("host ms a step", "host ms a step", targets=[("256", 1, "<=")], **found)
    if "profile" in parts and not brief:  # it compiles no other kernels than N
        llm.reset_prefix_cache()
        found = profile(llm, requests)
        _print("profile", "profile", targets=[("busy", 0.95, ">=")], **found)
    if "shared" in parts:
        num_prompt = min(4000, llm.engine.max_model_len - 300)
        target = [("x read by each", 1.5, ">=")]
        about = f"64 samples of a prompt of {num_prompt} tokens"
        found = time_shared(llm, num_prompt, 8 if brief else 256, turns)
        _print("shared", about, targets=target, **found)
    if "chats" in parts:
        sizes: dict[str, Any] = {"num_chats": 4, "per_second": 1e3} if brief else {}
        _print("chats", "chats", **serve_in_turns(llm, draw_chats, turns, **sizes))
    if variants := [name for name in VARIANTS if name in parts]:
        for name, found in time_variants(llm, requests, variants, turns).items():
            target = [("share of N", 0.85, ">=")]
            _print(name, VARIANTS[name][0], targets=target, **found)
    return base


def _free_memory() -> None:
    """Free an engine that is no longer referenced: its parts form cycles."""
    gc.unfreeze()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the parts that are named."""
    parser = argparse.ArgumentParser()
    parser.add_argument("parts", nargs="*", default=["n", "small", "host", "profile"])
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--brief", action="store_true", help="compile, and measure nothing")
    asked = parser.parse_args(arguments)
    if unknown := set(asked.parts) - CASES.keys():
        parser.error(
            f"no part is called {', '.join(sorted(unknown))}; there are {', '.join(CASES)}"
        )
    assert QWEN3.sizes is not None
    tokenizer = make_tokenizer(QWEN3.sizes["vocab_size"]) if "stop" in asked.parts else None

    def load(
        model: torch.nn.Module | None = None,
        *,
        max_model_len: int = 4608,
        memory_fraction: float = 0.15 if asked.brief else 0.9,
        **options: Any,
    ) -> LLM:
        llm = LLM(
            QWEN3.load(torch.bfloat16, "cuda") if model is None else model,
            tokenizer=None if model is not None else tokenizer,
            device="cuda",
            max_num_seqs=256,
            max_model_len=max_model_len,
            memory_fraction=memory_fraction,
            enforce_eager=asked.eager,
            **options,
        )
        gc.collect()
        gc.freeze()  # as `pagetile serve` does: a full collection would stop a step for 0.5 s
        return llm

    run_parts(asked.parts, load, draw_n(), brief=asked.brief)


def _print(name: str, about: str, **values: Any) -> None:
    print(json.dumps({"what": name, "about": about, **values}), flush=True)


if __name__ == "__main__":
    main()
