"""Random cases of an operation against float64, for as long as one likes.

    python tools/fuzz.py --cases 50000 --seed 0
    python tools/fuzz.py --cases 1 --seed 0 --first 1234           # one case of that run again
    python tools/fuzz.py --operation write_kv --cases 5000         # or another, or "others" for all
    TRITON_INTERPRET=1 python tools/fuzz.py --cases 300            # Triton's kernels, without a GPU
    python tools/fuzz.py --device cuda --processes 12 --cases 20000
    python tools/fuzz.py --device cuda --cases 50 --alike 1 --repeats 100    # the same bits

On a CPU every case runs on the CPU path as this machine plans it, on three threads; with bfloat16
also as on machines whose CPU cannot multiply it (in float32); every eighth case also on the
reference. Sequences that share their first blocks are run once more with ``shared_prefixes``, as
the CPU path shares them and in the two passes that a GPU makes. ``fuzz_operations`` has the other
operations, which run on a CPU, and by Triton if it interprets. On a GPU a case runs on the
implementation that "auto" chooses and on every one that supports it. There a group of successive
cases uses the same compiled kernels: they have other lengths, numbers and blocks, but the same
sizes and types.

Prints the worst error, as a share of the tolerance, by implementation and element types, and a
command that reproduces each failing case. Exits with 1 if there is one.
"""

import argparse
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from fuzz_operations import OPERATIONS
from tqdm import tqdm

from pagetile.device import DeviceInfo
from pagetile.errors import UnsupportedError
from pagetile.ops.attention_checks import default_scale
from pagetile.ops.paged_attention import make_plan, paged_attention, shared_prefixes
from pagetile.ops.paged_attention.plan import make_gpu_plan, make_hopper_prefill_plan
from pagetile.ops.paged_attention.plan.decode_tiles import LEAST_JOINED
from pagetile.ops.paged_attention.problem import Arguments
from pagetile.testing import (
    PagedCase,
    PagedInputs,
    compare,
    make_inputs,
    oracle,
    poisoned_memory,
    random_case,
    tolerance,
    vary,
)
from pagetile.tiles.state import AttentionOutput
from pagetile.tiles.triton.launch import INTERPRETED

if INTERPRETED:
    sys.path.append(str(Path(__file__).parents[1] / "tests"))
    import_module("fast_interpreter").hasten()

HERE = "triton" if INTERPRETED else "cpu"
"""The implementation that runs without a GPU."""
REFERENCE_EVERY = 8
GPU_IMPLEMENTATIONS = ("auto", "hopper_prefill", "hopper", "triton")
PART = 100  # cases of a group that a process takes at a time
STRIDED_EVERY = 4  # groups: kernels are compiled for the divisors of strides


@dataclass
class Tally:
    """Counts and errors of some cases."""

    cases: int = 0
    runs: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Keys are an implementation and element types."""
    worst: dict[tuple[str, str], float] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    has_lost_device: bool = False
    """Whether a kernel failed so that its process cannot use the GPU any more."""

    def add(self, other: "Tally") -> None:
        """Add another tally."""
        self.cases += other.cases
        self.runs += other.runs
        self.failures += other.failures
        self.has_lost_device |= other.has_lost_device
        for key, ratio in other.worst.items():
            self.worst[key] = max(self.worst.get(key, 0.0), ratio)


def main() -> int:
    """Run the cases; return the exit code."""
    options = _parse()
    last = options.first + options.cases
    size = options.alike
    # The first parts of all groups, which compile, come first; then processes share slow groups.
    part = min(size, PART)
    starts = range(options.first // size * size, last, size)
    cuts = [
        (at + cut, min(at + cut + part, at + size)) for cut in range(0, size, part) for at in starts
    ]
    chunks = [range(max(at, options.first), min(end, last)) for at, end in cuts]
    total = Tally()
    with tqdm(total=options.cases, unit="case", smoothing=0.02) as bar:
        for tally in _in_processes(options, chunks):
            total.add(tally)
            for failure in tally.failures:
                tqdm.write(failure)
            bar.update(tally.cases)
            worst = max(total.worst.values(), default=0.0)
            bar.set_postfix(worst=f"{worst:.2f}", failures=len(total.failures))
            if total.has_lost_device:
                break
    print(f"{total.cases} cases, {sum(total.runs.values())} runs, {len(total.failures)} failures")
    for name, types in sorted(total.worst, key=lambda key: -total.worst[key]):
        ratio, runs = total.worst[name, types], total.runs[name, types]
        print(f"{ratio:6.3f} of the tolerance  {name:20} {types:10} {runs:6} runs")
    return 1 if total.failures else 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--cases", type=int, default=1000, help="how many cases (default: 1000)")
    add("--seed", type=int, default=0, help="which sequence of cases (default: 0)")
    add("--first", type=int, default=0, help="where in it to begin (default: 0)")
    names = ["paged_attention", "others", *OPERATIONS]
    add("--operation", choices=names, default=names[0], help=f"which (default: {names[0]})")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="where to run (default: cpu)")
    add("--processes", type=int, default=1, help="how many work side by side (default: 1)")
    add("--alike", type=int, default=250, help="how many share a GPU's kernels (default: 250)")
    add("--repeats", type=int, default=0, help="calls that must repeat a case's bits (default: 0)")
    add("--seconds", type=float, default=float("inf"), help="after which no case is begun")
    options = parser.parse_args()
    if options.device == "cuda" and options.operation != names[0]:
        parser.error(f"--device cuda is for {names[0]}")
    options.until = time.time() + options.seconds
    return options


def _in_processes(options: argparse.Namespace, chunks: list[range]) -> Iterator[Tally]:
    if options.processes == 1:
        for chunk in chunks:
            yield from (run(options, range(number, number + 1)) for number in chunk)
        return
    with ProcessPoolExecutor(options.processes, mp_context=get_context("spawn")) as pool:
        try:
            for future in as_completed([pool.submit(run, options, chunk) for chunk in chunks]):
                yield future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def run(options: argparse.Namespace, numbers: range) -> Tally:
    """Run cases by their numbers, one after the other."""
    torch.set_num_threads(1)  # the oracle's products are small; the kernel's threads are planned
    tally = Tally()
    for number in numbers:
        if time.time() > options.until:
            break
        tally.cases += 1
        if options.operation != "paged_attention":
            _try_other(options, number, tally)
            continue
        case = _draw(options, number)
        try:
            for name, report in _try(case, number, options, tally):
                again = f"--seed {options.seed} --first {number} --device {options.device}"
                again += f" --alike {options.alike} --repeats {options.repeats}"
                again = f"python tools/fuzz.py --cases 1 {again}"
                tally.failures.append(f"FAILED on {name}: {case}\n{report}\n{case!r}\n{again}")
        except torch.AcceleratorError as error:  # an earlier case of this process made it fail
            tally.failures.append(f"not run: {case}\n{error!r}")
            tally.has_lost_device = True
        if tally.has_lost_device:
            break
    return tally


def _try_other(options: argparse.Namespace, number: int, tally: Tally) -> None:
    """Run one case of another operation, or of all others in turn."""
    name = options.operation
    if name == "others":
        known = [each for each, (_, impls) in OPERATIONS.items() if HERE in impls]
        name = known[number % len(known)]
    try:
        with poisoned_memory():
            ratios = OPERATIONS[name][0](random.Random(f"{options.seed}-{number}"), HERE)
        report: dict[str, object] = {n: ratio for n, ratio in ratios.items() if not ratio <= 1}
    except UnsupportedError:
        return
    except Exception as error:
        ratios, report = {}, {"raised": error}
    tally.runs[HERE, name] += 1
    tally.worst[HERE, name] = max([tally.worst.get((HERE, name), 0.0), *ratios.values()])
    if report:
        again = f"--cases 1 --seed {options.seed} --first {number} --operation {options.operation}"
        tally.failures.append(f"FAILED {name} on {HERE}: {report}\npython tools/fuzz.py {again}")


def _draw(options: argparse.Namespace, number: int) -> PagedCase:
    rng = random.Random(f"{options.seed}-{number}")
    if options.device == "cpu":
        case = _widen(random_case(rng), rng)
        if torch.bfloat16 not in (case.dtype, case.cache_dtype) or not INTERPRETED:
            return case
        kv_dtype = None if case.kv_dtype == torch.bfloat16 else case.kv_dtype
        return replace(case, dtype=torch.float16, kv_dtype=kv_dtype)
    group = number // options.alike
    like = random_case(random.Random(f"{options.seed}-lot-{group}"))
    return vary(replace(like, strided=like.strided and group % STRIDED_EVERY == 0), rng)


def _widen(case: PagedCase, rng: random.Random) -> PagedCase:
    """Give some cases more heads in a group, or wider heads, than most models have."""
    if rng.random() < 0.1 and sum(case.query_lens) < 300:
        case = replace(case, num_heads=case.num_kv_heads * rng.choice([9, 16, 33, 64, 71]))
    if rng.random() < 0.1:
        case = replace(case, head_size=rng.choice([264, 320, 512]))
    return case


def _vary_options(inputs: PagedInputs, rng: random.Random) -> PagedInputs:
    """Draw the biases' types and signs, an infinite sink, and the sign of keys' scales."""
    options, dtypes = dict(inputs.options), (torch.float32, torch.float16, torch.bfloat16)
    for name in ("alibi_slopes", "sinks"):
        if options[name] is not None:
            options[name] = (rng.choice([1, -1]) * options[name]).to(rng.choice(dtypes))
    if options["sinks"] is not None and rng.random() < 0.3:
        options["sinks"][0] = -torch.inf
    if options.get("k_scale") is not None and rng.random() < 0.3:
        options["k_scale"] = -options["k_scale"]
    return inputs.replace(options=options)


def _try(
    case: PagedCase, number: int, options: argparse.Namespace, tally: Tally
) -> Iterator[tuple[str, object]]:
    """Run a case on every implementation; yield failures by name."""
    inputs = make_inputs(case)
    if options.device == "cpu":
        inputs = _vary_options(inputs, random.Random(f"options-{options.seed}-{number}"))
    try:
        expected = oracle(inputs)
        allowed = tolerance(inputs, expected)
    except AssertionError as error:
        yield "the oracle", repr(error)
        return
    calls = _on_cpu(inputs, number) if options.device == "cpu" else _on_gpu(inputs)
    for name, call in calls:
        try:
            with poisoned_memory():
                first = call()
                repeated = all(_is_same(call(), first) for _ in range(options.repeats))
                result = AttentionOutput(*(x.cpu() for x in first))  # waits for the kernels
        except UnsupportedError:
            continue
        except torch.AcceleratorError as error:
            tally.has_lost_device = True
            yield name, repr(error)
            return
        except Exception as error:
            yield name, repr(error)
            continue
        comparison = compare(result, inputs, expected, allowed)
        key = name, _types(case)
        tally.runs[key] += 1 + options.repeats
        tally.worst[key] = max(tally.worst.get(key, 0.0), comparison.ratio)
        if not comparison.ratio <= 1:
            yield name, comparison
        if not repeated:
            yield name, "the same call gave other bits"


def _is_same(result: AttentionOutput, first: AttentionOutput) -> bool:
    return torch.equal(result.out, first.out) and torch.equal(result.lse, first.lse)


_Calls = Iterator[tuple[str, Callable[[], AttentionOutput]]]


def _on_cpu(inputs: PagedInputs, number: int) -> _Calls:
    out = {"out": inputs.out} if number % 2 else {}
    if INTERPRETED:
        yield "triton", lambda: inputs.attend(impl="triton", **out)
        many = make_gpu_plan(inputs.problem, DeviceInfo("cpu", 5), batch_invariant=number % 3 == 0)
        yield "triton, many splits", lambda: inputs.attend(impl="triton", plan=many, **out)
        return
    here = replace(DeviceInfo.of(inputs.q.device), num_workers=3)
    plan = make_plan(inputs.problem, here)
    yield "cpu", lambda: inputs.attend(impl="cpu", plan=plan, **out)
    if here.bf16_dot and inputs.q.dtype == inputs.k_cache.dtype == torch.bfloat16:
        there = make_plan(inputs.problem, replace(here, bf16_dot=False))
        yield "cpu without bf16_dot", lambda: inputs.attend(impl="cpu", plan=there)
    if inputs.case.shares_prefix and "visible_blocks" not in inputs.options:
        shared = inputs.share()
        yield "cpu, shared", lambda: shared.attend(impl="cpu")
        if inputs.case.sliding_window is None:
            yield "cpu, two passes", lambda: _in_two_passes(shared)
    if number % REFERENCE_EVERY == 0:
        yield "reference", lambda: inputs.attend(impl="reference")


def _in_two_passes(inputs: PagedInputs) -> AttentionOutput:
    def attend(call: Arguments) -> AttentionOutput:
        options: dict[str, Any] = call._asdict()
        return paged_attention(**options)

    options = dict(inputs.options)
    if options["softmax_scale"] is None:
        options["softmax_scale"] = default_scale(inputs.q)
    call = Arguments(inputs.q, inputs.k_cache, inputs.v_cache, inputs.batch, **options)
    return shared_prefixes.run(inputs.problem, attend, call, "auto")


def _on_gpu(inputs: PagedInputs) -> _Calls:
    there = inputs.to("cuda")

    def attend(impl: str, **options: Any) -> AttentionOutput:
        out = torch.full_like(there.out, torch.nan)
        return there.attend(impl=impl, out=out, **options)

    for impl in GPU_IMPLEMENTATIONS:
        yield impl, partial(attend, impl)
    device = DeviceInfo.of(there.q.device)
    plan = make_hopper_prefill_plan(inputs.problem, device, unpacks=True)
    if plan.unpacks:  # which other calls do where they are large
        yield "unpacking", partial(attend, "hopper_prefill", plan=plan)
    many = replace(inputs.problem, num_seqs=max(LEAST_JOINED, inputs.problem.num_seqs))
    plan = make_gpu_plan(many, device, hopper=True)
    if plan.tile_heads > 1:  # as in large batches
        yield "joined heads", partial(attend, "hopper", plan=plan)
    has_prefix = inputs.case.shares_prefix and "visible_blocks" not in inputs.options
    if has_prefix and inputs.case.sliding_window is None:
        yield "two passes", partial(_in_two_passes, there.share())


def _types(case: PagedCase) -> str:
    names = [str(dtype).removeprefix("torch.") for dtype in (case.dtype, case.cache_dtype)]
    short = [name.replace("bfloat", "bf").replace("float", "f") for name in names]
    return "/".join(dict.fromkeys(short))


if __name__ == "__main__":
    sys.exit(main())
