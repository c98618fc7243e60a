"""A small inference engine on pagetile's cache and kernels: continuous batching, prefix sharing.

::

    python examples/mini_engine.py

``Llama`` is a plain model that attends over cache blocks. ``Engine`` is the scheduler: it admits
prompts while blocks are free, computes prompts and single new tokens in one forward pass, and
indexes full blocks so that the next prompt with the same beginning finds them. The checkpoint is
the one that ships with the package; the tokens equal those of ``LLM`` (tests/test_examples.py).
"""

import json
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from pagetile import (
    BlockPool,
    BlockTable,
    KVCache,
    LayerSpec,
    PagedBatch,
    PrefixIndex,
    paged_attention,
    write_kv,
)  # fmt: skip
from pagetile.kv_cache.prefix_index import BlockHashes


class Llama:
    """A Llama checkpoint in float32 whose keys and values go to a paged cache."""

    def __init__(self, folder: Path) -> None:
        c = self.config = json.loads((folder / "config.json").read_text())
        weights = load_file(folder / "model.safetensors")
        self.w: dict[str, torch.Tensor] = {k: w.float() for k, w in weights.items()}
        self.heads, self.kv_heads, self.size = (
            c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"],
        )  # fmt: skip
        inverse = 1e4 ** (-torch.arange(0, self.size, 2) / self.size)
        angles = torch.outer(torch.arange(c["max_position_embeddings"]), inverse)
        self.cos, self.sin = (f(torch.cat([angles, angles], 1)) for f in (torch.cos, torch.sin))

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """Return the RMS norm of each row, scaled by the weights ``name``."""
        return F.rms_norm(x, x.shape[-1:], self.w[f"model.{name}.weight"], 1e-6)

    def rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return ``x`` ``[num_tokens, heads, head_size]`` with the rotary embedding applied."""
        low, high = x.chunk(2, dim=-1)
        half = torch.cat([-high, low], dim=-1)
        return x * self.cos[positions, None] + half * self.sin[positions, None]

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        batch: PagedBatch,
        cache: KVCache,
    ) -> torch.Tensor:
        """Return the logits of each sequence's last token, ``[num_seqs, vocab_size]``."""
        x = self.w["model.embed_tokens.weight"][token_ids]
        for i in range(self.config["num_hidden_layers"]):
            layer = f"layers.{i}"

            def w(name: str, layer: str = layer) -> torch.Tensor:
                return self.w[f"model.{layer}.{name}.weight"]

            h = self.norm(x, f"{layer}.input_layernorm")
            q, k, v = (
                (h @ w(f"self_attn.{name}_proj").T).view(len(h), -1, self.size) for name in "qkv"
            )
            q, k = self.rotate(q, positions), self.rotate(k, positions)
            write_kv(k, v, cache.k[i], cache.v[i], slots)
            out = paged_attention(q, cache.k[i], cache.v[i], batch).out
            x = x + out.flatten(1) @ w("self_attn.o_proj").T
            h = self.norm(x, f"{layer}.post_attention_layernorm")
            h = F.silu(h @ w("mlp.gate_proj").T) * (h @ w("mlp.up_proj").T)
            x = x + h @ w("mlp.down_proj").T
        last = batch.cu_seqlens_q[1:].long() - 1
        return self.norm(x[last], "norm") @ self.w["model.embed_tokens.weight"].T


@dataclass
class Sequence:
    """A prompt and its continuation."""

    token_ids: list[int]
    max_tokens: int
    table: BlockTable
    hashes: BlockHashes | None = None
    num_computed: int = 0
    num_cached: int = 0
    new: list[int] = field(default_factory=list)


class Engine:
    """Greedy generation for any number of prompts over one pool of blocks."""

    def __init__(self, model: Llama, num_blocks: int = 256, block_size: int = 16) -> None:
        self.model, self.pool = model, BlockPool(num_blocks, block_size)
        self.index = PrefixIndex(self.pool)
        spec = LayerSpec(model.kv_heads, model.size, model.size)
        self.cache = KVCache([spec] * model.config["num_hidden_layers"], self.pool)
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []

    def add(self, token_ids: list[int], max_tokens: int) -> Sequence:
        """Queue a prompt."""
        sequence = Sequence(list(token_ids), max_tokens, BlockTable(self.pool))
        self.waiting.append(sequence)
        return sequence

    def step(self) -> None:
        """Admit what fits, compute one forward pass, take the likeliest tokens."""
        promised = sum(
            s.table.blocks_needed(len(s.token_ids) + s.max_tokens - len(s.new) - s.num_computed)
            for s in self.running
        )
        while self.waiting:
            s = self.waiting[0]
            most = -(-(len(s.token_ids) + s.max_tokens) // self.pool.block_size)
            if not self.pool.can_allocate(promised + most):
                break  # its turn comes when running sequences have given blocks back
            promised += most
            s.hashes = s.table.adopt_prefix(self.index, s.token_ids)
            s.num_computed = s.num_cached = s.table.num_tokens
            self.running.append(self.waiting.pop(0))
        starts = [s.num_computed for s in self.running]
        for s in self.running:
            s.table.append(len(s.token_ids) - s.num_computed)  # copies no block: nothing forks
        spans = [(s, at, len(s.token_ids)) for s, at in zip(self.running, starts, strict=True)]
        logits = self.model.forward(
            torch.tensor([t for s, a, b in spans for t in s.token_ids[a:b]]),
            torch.tensor([p for _, a, b in spans for p in range(a, b)]),
            torch.tensor([slot for s, a, b in spans for slot in s.table.slots(a, b)]),
            PagedBatch.of(
                [s.table.blocks for s in self.running],
                [b for *_, b in spans],
                query_lens=[b - a for _, a, b in spans],
            ),
            self.cache,
        )
        for s, token in zip(list(self.running), logits.argmax(1).tolist(), strict=True):
            s.num_computed = len(s.token_ids)
            assert s.hashes is not None  # since it was admitted
            s.hashes.extend(s.token_ids)
            self.index.insert(s.hashes, s.table.blocks, s.num_computed // self.pool.block_size)
            s.token_ids.append(token)
            s.new.append(token)
            if len(s.new) == s.max_tokens:
                self.running.remove(s)
                s.table.free()  # its blocks stay findable until they are reused


def main() -> None:
    """Continue three prompts with a common beginning, the last one after the others."""
    from tokenizers import Tokenizer

    from pagetile.demo import path

    tokenizer = Tokenizer.from_file(str(path() / "tokenizer.json"))
    engine = Engine(Llama(path()))
    common = "import os\nimport sys\nfrom pathlib import Path\n\n\nclass Reader:\n    def "
    for prompts in (["open(self):\n", "close(self):\n"], ["read_lines(self):\n"]):
        added = [engine.add(tokenizer.encode(common + p).ids, max_tokens=24) for p in prompts]
        while engine.running or engine.waiting:
            engine.step()
        for sequence in added:
            print(f"--- {sequence.num_cached} prompt tokens were cached")
            print(tokenizer.decode(sequence.token_ids))
    engine.pool.check([])


if __name__ == "__main__":
    main()
