"""Cases of whole generation: our engine against two of Transformers' ways to generate."""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from pagetile.analysis.timing import Times, WallClock, ratio, take_turns
from pagetile.errors import UnsupportedError

from .case import Check, Measurement, Target
from .generators import BLOCK_SIZE, SHIPPED, Generate, Generators, Model, Prompts, load

PEERS: dict[str, Callable[[Generators, Prompts, int], Prompts]] = {
    "padded generate": Generators.padded,
    "continuous batching": Generators.continuous_batching,
}
REPEATS = 5  # at least, of which all are kept
FEW_LAYERS, FEW_PROMPTS, FEW_TOKENS = 2, 16, 32  # of what is compared with it in float32
_NO_ROUND = 1 << 20  # seeds of prompts from here on are used in no round
FIRST_TOKEN, LAST_TOKEN = 1, 4095  # 0 ends a text


@dataclass(frozen=True)
class EngineCase:
    """Greedy generation for a batch of random prompts.

    Each round has other prompts of equal lengths, so that no round can reuse another's cache.

    Metrics: ``tokens/s``, new ones by pagetile; ``x PEER``, how many times as fast as a peer;
    ``KV waste``, the share of held cache slots that held no token, averaged over steps;
    ``equal to PEER``, the share of prompts that got the peer's tokens; on a GPU ``milliseconds a
    step, 1 sequence``, the time for each token of one sequence alone.
    """

    name: str
    targets: tuple[Target, ...] = ()
    num_prompts: int = 64
    shortest: int = 16
    longest: int = 512
    max_tokens: int = 128
    device: str = "cpu"
    model: Model = SHIPPED
    dtype: torch.dtype = torch.float32
    peers: tuple[str, ...] = tuple(PEERS)

    @property
    def compile_effort(self) -> int:
        """See ``case.compile_effort``."""
        return 2 * (self.device == "cuda")

    @property
    def about(self) -> str:
        """The problem in one line."""
        return (
            f"generate: {self.num_prompts} prompts of {self.shortest} to {self.longest} tokens, "
            f"{self.max_tokens} new each, greedy, {self.model.about}, "
            f"{str(self.dtype).removeprefix('torch.')}"
        )

    def verify(self) -> list[Check]:
        """Compare the tokens with Transformers'.

        In 16 bits they may differ, since near-ties of logits are frequent there. Then the logits
        have to pass the comparison that the engine makes when it loads a model, and tokens are
        compared for a model of the same sizes but few layers, in float32.
        """
        if self.dtype == torch.float32:
            return [self._compare(self._load(), self._prompts(0), self.max_tokens)]
        try:
            self._load()
        except UnsupportedError as error:
            return [Check("logits of a few tokens", False, str(error))]
        assert self.model.sizes is not None, "the shipped checkpoint runs in float32"
        few = replace(self.model, sizes={**self.model.sizes, "num_hidden_layers": FEW_LAYERS})
        small = Generators(few, torch.float32, self.device, **self._limits())
        return [
            Check("logits of a few tokens", True, "proven on loading"),
            self._compare(small, self._prompts(0)[:FEW_PROMPTS], min(FEW_TOKENS, self.max_tokens)),
        ]

    def _compare(self, loaded: Generators, prompts: Prompts, max_tokens: int) -> Check:
        """Every prompt gets the tokens of padded ``generate``, or of ``generate`` alone.

        Rows of a batch round otherwise than a prompt alone, which may decide a near-tie.
        """
        generated, padded = (
            generate(prompts, max_tokens) for generate in (loaded.pagetile, loaded.padded)
        )
        differing = [i for i in range(len(prompts)) if generated[i] != padded[i]]
        wrong = [i for i in differing if loaded.padded([prompts[i]], max_tokens) != [generated[i]]]
        detail = f"{len(differing)} differ from padded generate, {len(wrong)} also from it alone"
        return Check(f"tokens of {len(prompts)} prompts", not wrong, f"{detail} {wrong}")

    def measure(self, repeats: int | None) -> Measurement:
        """Time pagetile and the peers in turns, each after a whole run to warm up."""
        loaded = self._load()
        generators: dict[str, Generate] = {
            "pagetile": loaded.pagetile,
            **{name: partial(PEERS[name], loaded) for name in self.peers},
        }
        for generate in generators.values():  # pagetile, for example, records its decode steps
            generate(self._prompts(0), self.max_tokens)
        counts = loaded.llm.engine.counts
        held, unused = counts.held_slots, counts.unused_slots
        results: dict[str, list[Prompts]] = {name: [] for name in generators}
        calls = {
            name: self._in_rounds(generate, results[name]) for name, generate in generators.items()
        }
        times = take_turns(calls, repeats=repeats or REPEATS, warmup=0, clock=WallClock())
        waste = (counts.unused_slots - unused) / (counts.held_slots - held)
        metrics = {**self._metrics(times, results), "KV waste": waste}
        if self.device == "cuda":
            metrics["milliseconds a step, 1 sequence"] = self._time_step(loaded.pagetile)
        return Measurement(times, metrics)

    def _load(self) -> Generators:
        return load(self.model, self.dtype, self.device, **self._limits())

    def _limits(self) -> dict[str, int]:
        """Our engine's defaults on a CPU; on a GPU they would leave the peers no memory."""
        if self.device == "cpu":
            return {}
        longest = self.longest + self.max_tokens
        blocks = self.num_prompts * -(-longest // BLOCK_SIZE)
        return {"max_model_len": longest, "num_blocks": blocks, "max_num_seqs": self.num_prompts}

    def _time_step(self, generate: Generate) -> float:
        """Milliseconds for each further token of one prompt."""

        def seconds(turn: int, max_tokens: int) -> float:
            prompts = self._prompts(turn)[:1]  # of the usual length, never seen before
            start = time.perf_counter()
            generate(prompts, max_tokens)
            return time.perf_counter() - start

        seconds(_NO_ROUND, 2)  # records the step
        found = [
            seconds(_NO_ROUND + turn, self.max_tokens) - seconds(_NO_ROUND + turn + 1, 1)
            for turn in (1, 3, 5)
        ]
        return 1e3 * statistics.median(found) / (self.max_tokens - 1)

    def _in_rounds(self, generate: Generate, results: list[Prompts]) -> Callable[[], None]:
        rounds = map(self._prompts, itertools.count(1))
        return lambda: results.append(generate(next(rounds), self.max_tokens))

    def _prompts(self, turn: int) -> Prompts:
        """Random tokens for each turn, with the same lengths in every turn."""
        lengths, tokens = random.Random(0), random.Random(turn)
        return [
            tokens.choices(
                range(FIRST_TOKEN, LAST_TOKEN + 1), k=lengths.randint(self.shortest, self.longest)
            )
            for _ in range(self.num_prompts)
        ]

    def _metrics(
        self, times: dict[str, Times], results: dict[str, list[Prompts]]
    ) -> dict[str, float]:
        generated = times["pagetile"]
        metrics = {"tokens/s": self.num_prompts * self.max_tokens / generated.median}
        for peer in self.peers:
            metrics[f"x {peer}"] = ratio(times[peer], generated)
            pairs = zip(_flat(results["pagetile"]), _flat(results[peer]), strict=True)
            equal = [a == b for a, b in pairs]
            metrics[f"equal to {peer}"] = sum(equal) / len(equal)
        return metrics


def _flat(rounds: list[Prompts]) -> Prompts:
    return [tokens for prompts in rounds for tokens in prompts]
