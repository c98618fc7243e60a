"""Apply small plausible bugs, one at a time, and report those that no test notices.

    python tools/mutants.py                       # all: about an hour on two cores
    python tools/mutants.py kv_cache scheduler    # those whose names begin so
    python tools/mutants.py --list

Each mutant replaces one piece of text of one file (tools/mutants.toml) in a copy of the tree and
runs the tests named for it, under Triton's interpreter where it says "interpreted". A mutant that
passes all of them survives: a test is missing. Exits with 1 if one survives, or if its text is not
in the file.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue

from tqdm import tqdm

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parent.parent
COPIED = ("src", "tests", "benchmarks", "examples", "tools", "docs", "pyproject.toml", "README.md")
LIMIT_SECONDS = 600
BY_TIME = f"caught by the limit of {LIMIT_SECONDS} s alone"


@dataclass(frozen=True)
class Mutant:
    """A bug: the text that it replaces, and the tests that should notice."""

    name: str
    file: str
    before: str
    after: str
    tests: tuple[str, ...]
    interpreted: bool = False

    @property
    def is_applicable(self) -> bool:
        """Whether its text is in the file exactly once."""
        return (ROOT / self.file).read_text(encoding="utf-8").count(self.before) == 1


def read_mutants() -> list[Mutant]:
    """Return all mutants of ``mutants.toml``."""
    listed = tomllib.loads((ROOT / "tools" / "mutants.toml").read_text(encoding="utf-8"))
    return [
        Mutant(
            name,
            one["file"],
            one["before"],
            one["after"],
            tuple(one["tests"]),
            one.get("interpreted", False),
        )
        for name, one in listed.items()
    ]


def copy_tree(folder: Path) -> None:
    """Copy what the tests need, without compiled kernels."""
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            ignore = shutil.ignore_patterns("__pycache__", "results")
            shutil.copytree(source, folder / name, ignore=ignore)
        else:
            shutil.copy2(source, folder)


def run_mutant(mutant: Mutant, copies: SimpleQueue[Path]) -> str:
    """Return ``"caught"``, ``BY_TIME``, ``"survived"`` or why it could not be tested.

    One copy is used for several mutants: kernels that a mutant leaves as they are compile once.
    """
    if not mutant.is_applicable:
        return "stale: its text is not in the file exactly once"
    folder = copies.get()
    target = folder / mutant.file
    text = target.read_text(encoding="utf-8")
    written = target.stat()
    environment = {**os.environ, "PYTHONPATH": str(folder / "src")}
    if mutant.interpreted:
        environment["TRITON_INTERPRET"] = "1"
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    try:
        target.write_text(text.replace(mutant.before, mutant.after), encoding="utf-8")
        done = subprocess.run(
            [*command, *mutant.tests], cwd=folder, env=environment, timeout=LIMIT_SECONDS,
            capture_output=True, text=True, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return BY_TIME  # it hangs, or the machine is slow: to be looked at
    finally:
        target.write_text(text, encoding="utf-8")
        os.utime(target, ns=(written.st_atime_ns, written.st_mtime_ns))
        copies.put(folder)
    if done.returncode == 0:
        return "survived"
    if done.returncode == 1 or done.returncode < 0:  # a test failed, or the process died
        return "caught"
    return f"not tried: pytest exited with {done.returncode}\n{done.stdout[-1000:]}"


def main() -> int:
    """Run the chosen mutants and print the survivors."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="how the names of mutants begin; without it, all")
    parser.add_argument("--list", action="store_true", help="print the names and stop")
    parser.add_argument("--processes", type=int, default=2, help="how many run at a time")
    options = parser.parse_args()
    chosen = [
        mutant
        for mutant in read_mutants()
        if not options.names or mutant.name.startswith(tuple(options.names))
    ]
    if options.list:
        print(*(f"{mutant.name}: {mutant.file}" for mutant in chosen), sep="\n")
        return 0
    start = time.perf_counter()
    with (
        tempfile.TemporaryDirectory(prefix="mutants-") as folder,
        ThreadPoolExecutor(options.processes) as pool,
    ):
        copies: SimpleQueue[Path] = SimpleQueue()
        for number in range(options.processes):
            copies.put(Path(folder) / str(number))
            copy_tree(Path(folder) / str(number))
        run = partial(run_mutant, copies=copies)
        results = list(tqdm(pool.map(run, chosen), total=len(chosen), unit="mutant"))
    for mutant, result in zip(chosen, results, strict=True):
        if result != "caught":
            print(f"{mutant.name}: {result}")
    caught = results.count("caught") + results.count(BY_TIME)
    print(f"{caught} of {len(chosen)} caught, {time.perf_counter() - start:.0f} s")
    return int(caught < len(chosen))


if __name__ == "__main__":
    sys.exit(main())
