"""What an engine counts: prompts, cached tokens, blocks, drafts."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CacheCounts"]


@dataclass
class CacheCounts:
    """What happened in the cache since the start."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens found in the cache at a request's first admission."""
    copied_blocks: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    """Tokens computed again, since preemption gave their blocks away and others took them."""
    peak_blocks: int = 0
    shared_blocks: int = 0
    """The most blocks that were held more than once at the same time."""
    held_slots: int = 0
    """Slots of held blocks, summed over steps."""
    unused_slots: int = 0
    """Those of them that hold no token."""
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    """Draft tokens that were what the sampler chose."""

    @property
    def waste(self) -> float:
        """Share of the held cache memory that held no token, averaged over steps."""
        return self.unused_slots / self.held_slots if self.held_slots else 0.0
