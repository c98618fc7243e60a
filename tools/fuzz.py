"""Random cases of paged attention against the float64 oracle, for as long as one likes.

    python tools/fuzz.py --cases 50000 --seed 0
    python tools/fuzz.py --cases 1 --seed 0 --first 1234    # one case of that run again

Every case runs on the CPU path as this machine plans it, on three threads; with bfloat16 also on
the float32 route of machines that cannot multiply it; every eighth case also on the reference.
Prints the worst error, as a part of what is allowed, by implementation and element types, and a
line that reproduces each failing case. Exits with 1 if there is one.
"""

import argparse
import random
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

import torch
from tqdm import tqdm

from pagewise.device import DeviceInfo
from pagewise.ops.paged_attention import make_plan
from pagewise.testing import (
    Comparison,
    PagedCase,
    PagedInputs,
    compare,
    make_inputs,
    oracle,
    poisoned_memory,
    random_case,
    tolerance,
)
from pagewise.tiles.state import AttentionOutput

REFERENCE_EVERY = 8


def main() -> int:
    """Run the cases; the exit code."""
    options = _parse()
    torch.set_num_threads(1)  # the oracle's products are small; the kernel's threads are planned
    worst: dict[tuple[str, str], float] = defaultdict(float)
    counts: dict[tuple[str, str], int] = defaultdict(int)
    failures = 0
    numbers = range(options.first, options.first + options.cases)
    with tqdm(numbers, unit="case", smoothing=0.02) as bar:
        for number in bar:
            case = random_case(random.Random(f"{options.seed}-{number}"))
            for name, comparison in _compare(case, number):
                key = name, _types(case)
                counts[key] += 1
                worst[key] = max(worst[key], comparison.ratio)
                if not comparison.ratio <= 1:
                    failures += 1
                    tqdm.write(_report(name, case, comparison, options.seed, number))
            bar.set_postfix(worst=f"{max(worst.values()):.2f}", failures=failures)
    print(f"{len(numbers)} cases, {sum(counts.values())} runs, {failures} failures")
    for name, types in sorted(worst, key=lambda key: -worst[key]):
        runs = counts[name, types]
        print(f"{worst[name, types]:6.3f} of the tolerance  {name:20} {types:10} {runs:6} runs")
    return 1 if failures else 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cases", type=int, default=1000, help="how many cases (default: 1000)")
    parser.add_argument("--seed", type=int, default=0, help="which sequence of cases (default: 0)")
    parser.add_argument("--first", type=int, default=0, help="where in it to begin (default: 0)")
    return parser.parse_args()


def _compare(case: PagedCase, number: int) -> Iterator[tuple[str, Comparison]]:
    """A case on every implementation: (name, errors)."""
    inputs = make_inputs(case)
    expected = oracle(inputs)
    allowed = tolerance(inputs, expected)
    with poisoned_memory():
        results = list(_results(inputs, number))
    for name, result in results:
        yield name, compare(result, inputs, expected, allowed)


def _results(inputs: PagedInputs, number: int) -> Iterator[tuple[str, AttentionOutput]]:
    here = replace(DeviceInfo.of(inputs.q.device), num_workers=3)
    yield "cpu", inputs.attend(impl="cpu", plan=make_plan(inputs.problem, here))
    if here.bf16_dot and inputs.q.dtype == inputs.k_cache.dtype == torch.bfloat16:
        there = replace(here, bf16_dot=False)
        plan = make_plan(inputs.problem, there)
        yield "cpu without bf16_dot", inputs.attend(impl="cpu", plan=plan)
    if number % REFERENCE_EVERY == 0:
        yield "reference", inputs.attend(impl="reference")


def _types(case: PagedCase) -> str:
    names = [str(dtype).removeprefix("torch.") for dtype in (case.dtype, case.cache_dtype)]
    short = [name.replace("bfloat", "bf").replace("float", "f") for name in names]
    return "/".join(dict.fromkeys(short))


def _report(name: str, case: PagedCase, comparison: Comparison, seed: int, number: int) -> str:
    again = f"python tools/fuzz.py --cases 1 --seed {seed} --first {number}"
    return f"FAILED on {name}: {case}\n{comparison}\n{case!r}\n{again}"


if __name__ == "__main__":
    sys.exit(main())
