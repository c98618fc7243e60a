"""Train the checkpoint that ships in `pagewise.demo`: a small Llama that writes Python.

    python tools/train_demo.py --minutes 55 --out src/pagewise/demo    # what made the shipped one
    python tools/train_demo.py --tokens 2_000_000 --out /tmp/demo      # a budget in tokens instead
    python tools/train_demo.py --evaluate src/pagewise/demo            # held-out bits per byte only

The text is the standard library of the Python that runs this script. About one file in 25, chosen
by a hash of its path, is held out whole: neither the tokenizer nor the model sees it. The script
needs `pagewise[engine]` and a C++ compiler (for torch.compile, which doubles the speed on a CPU).
"""

import argparse
import copy
import hashlib
import math
import os
import platform
import random
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor
from tqdm import tqdm
from transformers import (
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

END = "<|endoftext|>"  # stands before every file, so it is both the first and the last token
VOCAB_SIZE = 4096
TOKENS_PER_STEP = 8192
STAGES = (
    (0.0, 256),
    (0.5, 512),
    (0.85, 1024),
)  # (progress, window): short is cheap, long comes last
CONTEXT = 2048
WARM_UP = 0.02
EVAL_WINDOW, EVAL_STRIDE = 1024, 512
EXPORT_SECONDS = 300

# Generated tables, files that are wrong on purpose, and files that describe one machine.
SKIPPED = ("site-packages", "dist-packages", "encodings", "pydoc_data", "config-", "_sysconfigdata")

# A word takes its underscores and the space before it along, so `self._lock` is three pieces and
# an indented line starts with one. Digits stay single: there is nothing to learn in `41276`.
PIECES = Regex(r" ?[\p{L}_]+|\p{N}| ?[^\s\p{L}\p{N}_]+|\s+(?!\S)|\s+")


# --- text -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Corpus:
    """The standard library as texts by relative path, split by whole files."""

    train: dict[str, str]
    held_out: dict[str, str]


def load_corpus() -> Corpus:
    """Read the running Python's standard library and split it."""
    root = Path(sysconfig.get_path("stdlib"))
    train, held_out = {}, {}
    for file in sorted(root.rglob("*.py")):
        path = file.relative_to(root).as_posix()
        if any(part.startswith(SKIPPED) for part in path.split("/")):
            continue
        try:
            text = file.read_bytes().decode("utf-8")
        except UnicodeDecodeError:
            continue  # the tests hold a few files in other encodings
        if text.strip():
            (held_out if is_held_out(path) else train)[path] = text
    return Corpus(without_near_copies(train, held_out), held_out)


def is_held_out(path: str) -> bool:
    """Choose by the path alone, so that the choice outlives Python releases and seeds."""
    return int(hashlib.sha256(path.encode()).hexdigest(), 16) % 25 == 0


def without_near_copies(train: dict[str, str], held_out: dict[str, str]) -> dict[str, str]:
    """Drop training files that share over half of their long lines with some held-out file."""

    def long_lines(text: str) -> set[str]:
        return {line.strip() for line in text.splitlines() if len(line.strip()) >= 30}

    guarded = [lines for text in held_out.values() if (lines := long_lines(text))]

    def is_copy(text: str) -> bool:
        mine = long_lines(text)
        return any(2 * len(mine & theirs) > min(len(mine), len(theirs)) for theirs in guarded)

    return {path: text for path, text in train.items() if not is_copy(text)}


# --- tokenizer ------------------------------------------------------------------------------------


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE: every text has tokens and decodes to exactly itself."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(PIECES, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    bpe.post_processor = processors.TemplateProcessing(
        single=f"{END} $A", special_tokens=[(END, 0)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=END,
        eos_token=END,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )


def encode(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> list[Tensor]:
    """Token ids of each text, END before it (the tokenizer adds it)."""
    return [torch.tensor(ids) for ids in tokenizer(texts, verbose=False)["input_ids"]]


# --- model and optimisers -------------------------------------------------------------------------


def build_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """A Llama with grouped-query attention that fits in 10 MB of bfloat16."""
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        num_attention_heads=4,  # of 64: on a CPU attention costs by the score, so by the head
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = LlamaForCausalLM(config)
    # Only here: a padding token in the config would freeze that token's embedding.
    model.generation_config.pad_token_id = tokenizer.eos_token_id
    return model


def build_optimisers(model: LlamaForCausalLM) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, AdamW for the embedding and the norms."""
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    inside = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in inside]
    return [
        torch.optim.Muon(matrices, lr=8e-3, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=6e-3, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def lr_factor(progress: float) -> float:
    """Linear warm-up, then linear all the way to zero."""
    return min(progress / WARM_UP, (1 - progress) / (1 - WARM_UP))


# --- training -------------------------------------------------------------------------------------


class Windows:
    """Endless batches cut from the shuffled files laid end to end; the seed decides the order."""

    def __init__(self, files: list[Tensor], seed: int) -> None:
        self.files = files
        self.shuffle = random.Random(seed).shuffle
        self.rest = torch.empty(0, dtype=torch.long)

    def batch(self, window: int) -> tuple[Tensor, Tensor]:
        """The next TOKENS_PER_STEP tokens as (inputs, targets), each `[rows, window]`."""
        while len(self.rest) <= TOKENS_PER_STEP:
            self.shuffle(self.files)
            self.rest = torch.cat([self.rest, *self.files])
        ids, self.rest = self.rest[: TOKENS_PER_STEP + 1], self.rest[TOKENS_PER_STEP:]
        return ids[:-1].view(-1, window), ids[1:].view(-1, window)


class Budget:
    """How far the run is, from 0 to 1, in minutes or in tokens."""

    def __init__(self, minutes: float | None, tokens: int | None) -> None:
        self.seconds = minutes and minutes * 60
        self.tokens = tokens
        self.started = time.monotonic()

    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.started

    def progress(self, tokens_seen: int) -> float:
        """The used share of the budget."""
        used = self.elapsed() / self.seconds if self.seconds else tokens_seen / self.tokens
        return min(used, 1.0)


def train(model: LlamaForCausalLM, windows: Windows, budget: Budget) -> Iterator[tuple[int, float]]:
    """Train until the budget is spent; yield (tokens seen, smoothed loss) after every step."""
    optimisers = build_optimisers(model)
    peaks = [optimiser.param_groups[0]["lr"] for optimiser in optimisers]

    @torch.compile(dynamic=False)
    def loss_of(inputs: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(input_ids=inputs, use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    tokens, smooth = 0, math.log(VOCAB_SIZE)
    while (progress := budget.progress(tokens)) < 1:
        for optimiser, peak in zip(optimisers, peaks, strict=True):
            optimiser.param_groups[0]["lr"] = peak * lr_factor(progress)
        window = max(size for start, size in STAGES if start <= progress)
        loss = loss_of(*windows.batch(window))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimiser in optimisers:
            optimiser.step()
            optimiser.zero_grad()
        tokens += TOKENS_PER_STEP
        smooth += 0.02 * (loss.item() - smooth)
        yield tokens, smooth


# --- evaluation -----------------------------------------------------------------------------------


def evaluate(folder: Path, corpus: Corpus) -> float:
    """Bits per UTF-8 byte that the weights in `folder` spend on the held-out files."""
    texts = list(corpus.held_out.values())
    files = encode(AutoTokenizer.from_pretrained(folder), texts)
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    windows = [window for ids in files for window in scored_windows(ids)]
    nats = 0.0
    with torch.inference_mode():
        for inputs, targets in tqdm(windows, desc="held out", unit=" windows"):
            logits = model(input_ids=inputs[None], use_cache=False).logits[0]
            nats += F.cross_entropy(logits, targets, reduction="sum").item()
    return nats / math.log(2) / sum(len(text.encode()) for text in texts)


def scored_windows(ids: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Cut a file so that each token is scored once, with EVAL_STRIDE tokens before it or all."""
    for start in range(0, len(ids) - 1, EVAL_STRIDE):
        chunk = ids[max(0, start + EVAL_STRIDE - EVAL_WINDOW) : start + EVAL_STRIDE + 1]
        targets = chunk[1:].clone()
        targets[: -len(ids[start + 1 : start + EVAL_STRIDE + 1])] = -100  # scored before
        yield chunk[:-1], targets


# --- the folder -----------------------------------------------------------------------------------


def export(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Write the checkpoint beside `out`, then move it in by file: nobody reads half a file."""
    fresh = out.with_name(out.name + ".partial")
    copy.deepcopy(model).bfloat16().save_pretrained(fresh)
    tokenizer.save_pretrained(fresh)
    out.mkdir(parents=True, exist_ok=True)
    for file in fresh.iterdir():
        file.replace(out / file.name)
    fresh.rmdir()


CARD = """\
---
library_name: transformers
pipeline_tag: text-generation
license: psf-2.0
---
# The pagewise demo checkpoint

A Llama of {parameters:.2f} M parameters that continues Python source code: {layers} layers of width
{width}, {heads} query heads over {kv_heads} key-value heads of size {head_size}, tied embeddings, a byte-level BPE
vocabulary of {vocab}, bfloat16. It exists so that `pagewise` can run a real Transformers checkpoint
without a download. It is a demonstration of an engine, not a coding assistant: it knows how the
standard library looks, not what is true.

- **Held out: {bits:.3f} bits per byte** over {held_out_files} whole files ({held_out_bytes:,} bytes of UTF-8) that
  neither the tokenizer nor the model has seen, with the weights in this folder, computed in
  float32: `python tools/train_demo.py --evaluate src/pagewise/demo`. Every file starts after
  `<|endoftext|>`; windows of {window} tokens advance by {stride}, so past the first {stride} a token is
  scored once with at least {stride} tokens before it.
- **Data**: the standard library of CPython {python}, its tests included, generated tables
  left out: {train_files} files, {train_bytes:,} bytes. One file in 25 is held out by a hash of its path; training
  files that share over half of their long lines with a held-out file are dropped.
- **Training**: {tokens:,} tokens ({epochs:.1f} passes) in {minutes:.0f} minutes on {cores} shared {machine} cores,
  torch {torch}, windows of {stages} tokens, by
  `python tools/train_demo.py {budget} --seed {seed} --out DIR`.
- **Context**: {context} positions are allowed, {longest} were trained.
- **Licence**: the weights were trained on text under the Python Software Foundation License
  Version 2, copyright (c) Python Software Foundation, and can repeat pieces of it; use what they
  write accordingly.
"""


def describe(
    model: LlamaForCausalLM, corpus: Corpus, options: argparse.Namespace, facts: dict[str, float]
) -> str:
    """The model card."""
    config = model.config
    return CARD.format(
        parameters=model.num_parameters() / 1e6,
        layers=config.num_hidden_layers,
        width=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_size=config.head_dim,
        vocab=VOCAB_SIZE,
        context=CONTEXT,
        longest=STAGES[-1][1],
        stages=", ".join(str(window) for _, window in STAGES),
        window=EVAL_WINDOW,
        stride=EVAL_STRIDE,
        train_files=len(corpus.train),
        train_bytes=sum(len(text.encode()) for text in corpus.train.values()),
        held_out_files=len(corpus.held_out),
        held_out_bytes=sum(len(text.encode()) for text in corpus.held_out.values()),
        python=platform.python_version(),
        torch=torch.__version__,
        cores=os.cpu_count(),
        machine=platform.machine(),
        budget=f"--minutes {options.minutes:g}"
        if options.minutes
        else f"--tokens {options.tokens}",
        seed=options.seed,
        **facts,
    )


# --- command line ---------------------------------------------------------------------------------


def parse_arguments() -> argparse.Namespace:
    """A budget to train on, or a folder to evaluate."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--minutes", type=float, help="train for this long")
    what.add_argument("--tokens", type=int, help="train on this many tokens")
    what.add_argument("--evaluate", type=Path, metavar="DIR", help="only score this checkpoint")
    parser.add_argument("--out", type=Path, default=Path("demo"), help="where to write it")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the data order")
    return parser.parse_args()


def main() -> None:
    """Train, export as we go, score what was written, describe it."""
    options = parse_arguments()
    corpus = load_corpus()
    if options.evaluate:
        print(f"{evaluate(options.evaluate, corpus):.4f} bits per byte")
        return
    torch.manual_seed(options.seed)
    tokenizer = train_tokenizer(list(corpus.train.values()))
    files = encode(tokenizer, list(corpus.train.values()))
    model = build_model(tokenizer)
    budget = Budget(options.minutes, options.tokens)
    bar = tqdm(total=1.0, bar_format="{percentage:5.1f} % {bar:30} {elapsed} < {remaining} {desc}")
    exported, tokens = 0.0, 0
    for tokens, loss in train(model, Windows(files, options.seed), budget):
        bar.update(budget.progress(tokens) - bar.n)
        bar.set_description_str(f"{tokens / 1e6:.2f} M tokens, loss {loss:.3f}")
        if budget.elapsed() > exported + EXPORT_SECONDS:
            export(model, tokenizer, options.out)
            exported = budget.elapsed()
    bar.close()
    minutes = budget.elapsed() / 60
    export(model, tokenizer, options.out)
    bits = evaluate(options.out, corpus)
    facts = {
        "bits": bits,
        "tokens": tokens,
        "minutes": minutes,
        "epochs": tokens / sum(map(len, files)),
    }
    (options.out / "README.md").write_text(describe(model, corpus, options, facts))
    print(f"{bits:.4f} bits per byte held out; {tokens:,} tokens in {minutes:.1f} minutes")


if __name__ == "__main__":
    main()
