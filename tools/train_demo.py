"""Train the checkpoint that ships in `pagetile.demo`: a small Llama that writes Python.

    python tools/train_demo.py --tokens 40_000_000 --out src/pagetile/demo    # the shipped one
    python tools/train_demo.py --minutes 30 --out demo     # a budget in minutes instead
    python tools/train_demo.py --evaluate src/pagetile/demo    # held-out bits per byte only

The text is the standard library of the Python that runs this script, or what `--source` names.
About one file in 25, chosen by a hash of its path, is held out whole: neither the tokenizer nor
the model sees it. Needs `pagetile[engine]` and a C++ compiler; takes a GPU if there is one.
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
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor
from tqdm import tqdm
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

END = "<|endoftext|>"  # precedes every file: both the first and the last token
VOCAB_SIZE = 4096
CONTEXT = 2048
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOKENS_PER_STEP = 32768 if DEVICE == "cuda" else 4096  # two cores cannot feed a larger step
STAGES = [(0.0, 512), (0.75, 1024)]  # (progress, window): short windows first, since they are cheap
GOLDEN_SECTION = (math.sqrt(5) - 1) / 2
WARM_UP = 0.02  # share of the run
EVAL_WINDOW, EVAL_STRIDE = 1024, 512
EXPORT_SECONDS = 300

# Generated tables, other people's packages, and files that describe one machine.
SKIPPED = ("site-packages", "dist-packages", "encodings", "pydoc_data", "config-", "_sysconfigdata")

# A word includes its underscores and the space before it, so `self._lock` is three pieces and an
# indented line starts with one. Digits stay single, since long numbers have no structure to learn.
PIECES = Regex(r" ?[\p{L}_]+|\p{N}| ?[^\s\p{L}\p{N}_]+|\s+(?!\S)|\s+")


def load_corpus(root: Path) -> tuple[list[str], list[str]]:
    """Read a tree of Python sources: (training texts, held-out texts)."""
    texts: list[str] = []
    held_out: list[str] = []
    for file in sorted(root.rglob("*.py")):
        path = file.relative_to(root)
        if any(part.startswith(SKIPPED) for part in path.parts):
            continue
        try:
            text = file.read_bytes().decode("utf-8")
        except UnicodeDecodeError:
            continue  # the tests hold a few files in other encodings
        if text.strip():
            (held_out if is_held_out(path) else texts).append(text)
    return without_near_copies(texts, held_out), held_out


def is_held_out(path: Path) -> bool:
    """Decide by the path alone, so that all Python releases and seeds choose the same files."""
    return int(hashlib.sha256(path.as_posix().encode()).hexdigest(), 16) % 25 == 0


def without_near_copies(texts: list[str], held_out: list[str]) -> list[str]:
    """Drop the texts that share over half of their long lines with some held-out text."""

    def long_lines(text: str) -> set[str]:
        return {line.strip() for line in text.splitlines() if len(line.strip()) >= 30}

    guarded = [lines for lines in map(long_lines, held_out) if lines]

    def is_copy(text: str) -> bool:
        own = long_lines(text)
        return any(2 * len(own & others) > min(len(own), len(others)) for others in guarded)

    return [text for text in texts if not is_copy(text)]


def num_bytes(texts: list[str]) -> int:
    """Size of the texts in UTF-8."""
    return sum(len(text.encode()) for text in texts)


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE: every text has tokens, starts after END and decodes to exactly itself."""
    bpe = Tokenizer(models.BPE())
    by_piece = pre_tokenizers.Split(PIECES, behavior="isolated")
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.pre_tokenizer = pre_tokenizers.Sequence([by_piece, as_bytes])
    bpe.decoder = decoders.ByteLevel()
    bpe.post_processor = processors.TemplateProcessing(f"{END} $A", special_tokens=[(END, 0)])
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


def build_model(end: int) -> LlamaForCausalLM:
    """A Llama with grouped-query attention whose weights stay below 10 MB in bfloat16."""
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=5,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=end,
        eos_token_id=end,
    )
    model = LlamaForCausalLM(config)
    model.generation_config.pad_token_id = end  # in `config` END's embedding would not be trained
    return model.to(DEVICE)


def build_optimisers(model: LlamaForCausalLM) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, AdamW for the embedding and the norms."""
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    inside = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in inside]
    return [
        torch.optim.Muon(matrices, lr=6e-3, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=5e-3, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def lr_factor(progress: float) -> float:
    """Linear warm-up, then a linear decay to zero."""
    return min(progress / WARM_UP, (1 - progress) / (1 - WARM_UP))


class Windows:
    """Endless batches from the shuffled, concatenated files; the seed decides the order.

    Each window starts a golden section of the text after the last one, so that a batch mixes many
    files and any number of windows covers the text evenly.
    """

    def __init__(self, files: list[Tensor], seed: int) -> None:
        self.ids = torch.cat(random.Random(seed).sample(files, len(files)))
        self.taken = 0

    def batch(self, window: int) -> tuple[Tensor, Tensor]:
        """The next TOKENS_PER_STEP tokens as (inputs, targets), each `[rows, window]`."""
        rows = torch.arange(TOKENS_PER_STEP // window, dtype=torch.float64) + self.taken
        self.taken += len(rows)
        starts = (rows * GOLDEN_SECTION % 1 * (len(self.ids) - window)).long()
        places = starts[:, None] + torch.arange(window)
        return self.ids[places], self.ids[places + 1]


class Step(NamedTuple):
    """The progress of a run."""

    progress: float = 0.0  # used share of the budget
    tokens: int = 0
    seconds: float = 0.0
    loss: float = math.log(VOCAB_SIZE)  # in nats per token, smoothed


def train(
    model: LlamaForCausalLM, windows: Windows, minutes: float | None, max_tokens: int | None
) -> Iterator[Step]:
    """Train until the minutes or the tokens are used up, and yield a ``Step`` after every step."""
    optimisers = build_optimisers(model)
    peaks = [optimiser.param_groups[0]["lr"] for optimiser in optimisers]

    @torch.compile(dynamic=False)
    def loss_of(inputs: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast(DEVICE, torch.bfloat16):
            logits = model(input_ids=inputs, use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    start = time.monotonic()
    step = Step()
    while step.progress < 1:
        for optimiser, peak in zip(optimisers, peaks, strict=True):
            optimiser.param_groups[0]["lr"] = peak * lr_factor(step.progress)
        window = max(size for begins, size in STAGES if begins <= step.progress)
        inputs, targets = windows.batch(window)
        loss = loss_of(inputs.to(DEVICE), targets.to(DEVICE))
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimiser in optimisers:
            optimiser.step()
            optimiser.zero_grad()
        tokens = step.tokens + TOKENS_PER_STEP
        seconds = time.monotonic() - start
        used = seconds / 60 / minutes if minutes else tokens / (max_tokens or 1)
        smooth = 0.95 * step.loss + 0.05 * loss.item()
        step = Step(min(used, 1.0), tokens, seconds, smooth)
        yield step


def export(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Write the checkpoint next to `out`, then move each file: no reader sees half a file."""
    fresh = out.with_name(out.name + ".partial")
    copy.deepcopy(model).bfloat16().save_pretrained(fresh)
    tokenizer.save_pretrained(fresh)
    out.mkdir(parents=True, exist_ok=True)
    for file in fresh.iterdir():
        file.chmod(0o644)  # safetensors writes for its owner only
        file.replace(out / file.name)
    fresh.rmdir()


def evaluate(folder: Path, texts: list[str]) -> float:
    """Bits per UTF-8 byte of the texts under the checkpoint in `folder`, run in float32."""
    files = encode(AutoTokenizer.from_pretrained(folder), texts)
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    windows = [window for ids in files for window in scored_windows(ids)]
    nats = 0.0
    with torch.inference_mode():
        for inputs, targets in tqdm(windows, desc="held out", unit=" windows"):
            logits = model(input_ids=inputs[None], use_cache=False).logits[0]
            nats += F.cross_entropy(logits, targets, reduction="sum").item()
    return nats / math.log(2) / num_bytes(texts)


def scored_windows(ids: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Windows of a file that score each token once, after EVAL_STRIDE tokens or all before it."""
    for start in range(0, len(ids) - 1, EVAL_STRIDE):
        end = min(start + EVAL_STRIDE, len(ids) - 1)
        chunk = ids[max(0, start + EVAL_STRIDE - EVAL_WINDOW) : end + 1]
        targets = chunk[1:].clone()
        targets[: -(end - start)] = -100  # scored in the window before
        yield chunk[:-1], targets


def model_card(
    source: Path, texts: list[str], held_out: list[str], run: Step, bits: float, command: str
) -> str:
    """The README.md of the checkpoint."""
    return f"""\
---
library_name: transformers
pipeline_tag: text-generation
license: psf-2.0
---

# The pagetile demo checkpoint

A small Llama that continues Python source code. `pagetile` ships it so that a real checkpoint runs
without a download. It shows off an engine; it is not a coding assistant.

- **Held out: {bits:.3f} bits per byte**, over {len(held_out)} whole files ({num_bytes(held_out):,}
  bytes) that neither the tokenizer nor the model has seen, with the weights in this folder in
  float32: `python tools/train_demo.py --evaluate DIR`. Every file starts after `{END}`;
  windows of {EVAL_WINDOW} tokens advance by {EVAL_STRIDE}, so each token is scored once, with at
  least {EVAL_STRIDE} before it or all there are.
- **Data**: the standard library of {source.name}, its tests included,
  generated tables left out: {len(texts)} files, {num_bytes(texts):,} bytes. One file in 25 is held
  out by a hash of its path; one that shares over half of its long lines with a held-out file is in
  neither part.
- **Training**: {run.tokens:,} tokens in {run.seconds / 60:.1f} minutes on {machine()},
  torch {torch.__version__}: `{command}`.
- **Context**: {CONTEXT} positions are allowed, {STAGES[-1][1]} were trained.
- **Licence**: the text is under the Python Software Foundation License Version 2, copyright (c)
  Python Software Foundation. The weights can repeat pieces of it.
"""


def machine() -> str:
    """The hardware that trained it."""
    if DEVICE == "cuda":
        return f"one {torch.cuda.get_device_name()}"
    return f"{os.cpu_count()} {platform.machine()} cores"


def parse_arguments() -> argparse.Namespace:
    """A budget to train on, or a folder to evaluate."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--minutes", type=float, help="train for this long")
    what.add_argument("--tokens", type=int, help="train on this many tokens")
    what.add_argument("--evaluate", type=Path, metavar="DIR", help="only score this checkpoint")
    parser.add_argument("--out", type=Path, default=Path("demo"), help="where to write it")
    stdlib = Path(sysconfig.get_path("stdlib"))
    parser.add_argument("--source", type=Path, default=stdlib, help="tree of Python sources")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the data order")
    return parser.parse_args()


def main() -> None:
    """Train with exports in between, evaluate the result, and write its model card."""
    options = parse_arguments()
    texts, held_out = load_corpus(options.source)
    if options.evaluate:
        print(f"{evaluate(options.evaluate, held_out):.4f} bits per byte held out")
        return

    torch.manual_seed(options.seed)
    tokenizer = train_tokenizer(texts)
    model = build_model(tokenizer.eos_token_id)
    windows = Windows(encode(tokenizer, texts), options.seed)
    exported, step = 0.0, Step()
    bar = tqdm(total=1.0, bar_format="{percentage:5.1f} % {bar:30} {elapsed}<{remaining}{postfix}")
    for step in train(model, windows, options.minutes, options.tokens):
        bar.set_postfix_str(f"{step.tokens / 1e6:.2f} M tokens, loss {step.loss:.3f}", False)
        bar.update(step.progress - bar.n)
        if step.seconds > exported + EXPORT_SECONDS:
            export(model, tokenizer, options.out)
            exported = step.seconds
    bar.close()
    export(model, tokenizer, options.out)

    bits = evaluate(options.out, held_out)
    budget = f"--minutes {options.minutes:g}" if options.minutes else f"--tokens {options.tokens}"
    command = f"python tools/train_demo.py {budget} --seed {options.seed} --out DIR"
    card = model_card(options.source, texts, held_out, step, bits, command)
    (options.out / "README.md").write_text(card)
    print(f"{bits:.4f} bits per byte held out after {step.tokens:,} tokens, {step.seconds:.0f} s")


if __name__ == "__main__":
    main()
