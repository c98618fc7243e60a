"""Cases of whole generation: our engine against both ways that Transformers generates."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass

from .case import Check, Measurement, Target
from .generators import Generate, Prompts, continuous_batching, load_llm, ours, padded
from .timing import Contestant, Times, ratio, take_turns

__all__ = ["EngineCase"]

PEERS = {"padded generate": padded, "continuous batching": continuous_batching}
SMALL = 4  # prompts, and tokens of each, of a warm-up
FIRST_TOKEN, LAST_TOKEN = 1, 4095  # 0 ends a text


@dataclass(frozen=True)
class EngineCase:
    """Greedy generation for a batch of random prompts.

    Every round has prompts of its own, of the same lengths: nobody can reuse the round before.

    Metrics: ``tokens/s``, new ones of ours; ``x PEER``, how many times as fast as a peer;
    ``KV waste``, the share of held cache slots that held no token, averaged over steps;
    ``equal to PEER``, the share of prompts that got the peer's tokens.
    """

    name: str
    targets: tuple[Target, ...] = ()
    num_prompts: int = 64
    shortest: int = 16
    longest: int = 512
    max_tokens: int = 128
    device: str = "cpu"

    @property
    def about(self) -> str:
        """The problem in one line."""
        return (
            f"generate: {self.num_prompts} prompts of {self.shortest} to {self.longest} tokens, "
            f"{self.max_tokens} new each, greedy, shipped checkpoint, float32"
        )

    def verify(self) -> list[Check]:
        """Every prompt gets the tokens of padded ``generate``, or of ``generate`` alone.

        A batch rounds otherwise than a prompt alone, which may tip a tie.
        """
        prompts = self._prompts(0)
        mine, theirs = (generate(prompts, self.max_tokens) for generate in (ours, padded))
        differing = [i for i in range(len(prompts)) if mine[i] != theirs[i]]
        wrong = [i for i in differing if padded([prompts[i]], self.max_tokens) != [mine[i]]]
        detail = f"{len(differing)} differ from padded generate, {len(wrong)} also from it alone"
        return [Check(f"tokens of {len(prompts)} prompts", not wrong, f"{detail} {wrong}")]

    def measure(self, repeats: int | None) -> Measurement:
        """Time ours and the peers in turns, each warmed up on a small run."""
        generators: dict[str, Generate] = {"pagewise": ours, **PEERS}
        for generate in generators.values():
            generate([prompt[:SMALL] for prompt in self._prompts(0)[:SMALL]], SMALL)
        counts = load_llm().engine.counts
        held, unused = counts.held_slots, counts.unused_slots
        results: dict[str, list[Prompts]] = {name: [] for name in generators}
        contestants = {
            name: Contestant(self._in_rounds(generate, results[name]))
            for name, generate in generators.items()
        }
        times = take_turns(contestants, repeats=repeats or 3, warmup=0)
        waste = (counts.unused_slots - unused) / (counts.held_slots - held)
        return Measurement(times, {**self._metrics(times, results), "KV waste": waste})

    def _in_rounds(self, generate: Generate, results: list[Prompts]) -> Callable[[], None]:
        rounds = map(self._prompts, itertools.count(1))
        return lambda: results.append(generate(next(rounds), self.max_tokens))

    def _prompts(self, turn: int) -> Prompts:
        """Lengths that are the same every turn, tokens that are not."""
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
        mine = times["pagewise"]
        metrics = {"tokens/s": self.num_prompts * self.max_tokens / mine.median}
        for peer in PEERS:
            metrics[f"x {peer}"] = ratio(times[peer], mine)
            pairs = zip(_flat(results["pagewise"]), _flat(results[peer]), strict=True)
            equal = [a == b for a, b in pairs]
            metrics[f"equal to {peer}"] = sum(equal) / len(equal)
        return metrics


def _flat(rounds: list[Prompts]) -> Prompts:
    return [tokens for prompts in rounds for tokens in prompts]
