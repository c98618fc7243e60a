"""Machine code of compiled Triton kernels: resources, loops, and reads of uninitialised registers.

Triton ships ``cuobjdump`` and ``nvdisasm``, so this needs no GPU. Tests of compiled kernels count
spilled bytes and the instructions of their loops with these functions.
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import triton

Labels = dict[str, int]
"""The index of the instruction after each label."""

_NONE: frozenset[int] = frozenset()
_MAY_END = ("@", "BRA", "BRX", "EXIT", "RET")
"""Beginnings of instructions after which another one than the next may be executed."""


def dump(compiled: Any, tmp_path: Path, option: str, tool: str = "cuobjdump") -> str:
    """The output of one of Triton's tools for a compiled kernel."""
    return _dump(compiled.asm["cubin"], tmp_path / "kernel.cubin", option, tool)


@functools.lru_cache(maxsize=4)
def _dump(content: bytes, cubin: Path, option: str, tool: str) -> str:
    cubin.write_bytes(content)
    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / tool
    command = [os.fspath(path), option, os.fspath(cubin)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def resources(compiled: Any, tmp_path: Path) -> dict[str, int]:
    """A kernel's resources by ``cuobjdump``'s names: ``REG`` and bytes of ``STACK`` a thread."""
    text = dump(compiled, tmp_path, "--dump-resource-usage")
    return {name: int(number) for name, number in re.findall(r"(\w+):(\d+)", text)}


def list_instructions(compiled: Any, tmp_path: Path) -> tuple[list[str], Labels]:
    """A kernel's instructions by ``nvdisasm``, and the index of the one after each label."""
    return read_listing(dump(compiled, tmp_path, "-c", "nvdisasm"))


def read_listing(text: str) -> tuple[list[str], Labels]:
    """Instructions and labels of ``nvdisasm``'s output."""
    code: list[str] = []
    labels: Labels = {}
    for line in text.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = len(code)
        elif found := re.match(r"\s+/\*[0-9a-f]+\*/\s+(.*)", line):
            code.append(found[1])
    return code, labels


def uninitialised_loads(code: list[str], labels: Labels) -> list[str]:
    """Loads of spilled words that were not stored on every path to them.

    ptxas has generated such code where two branches of a loop need the same descriptors and uniform
    registers run out: it stored them in one branch and loaded them in the other. Loads of a word
    only to change some of its bits, as for packed predicates, are left out, and so is half of a
    pair that the next instruction with its register overwrites.
    """
    stored = _made_before(code, labels, _stores)
    return [
        code[at]
        for at, known in stored.items()
        if _spilled(code[at])[0] == "LDL"
        and any(not _is_idle(code, at, word) for word in _spilled(code[at])[1] - known)
    ]


def uninitialised_reads(code: list[str], labels: Labels) -> list[str]:
    """Reads of uniform registers that were not written on every path to them.

    ptxas has generated such code where two loops multiply the same queries: it computed their
    descriptor before the first and used it in the second, and a branch skips the first. Half of a
    pair that is moved, and overwritten before anything reads it, is left out.
    """
    written = _made_before(code, labels, lambda instruction: _uniform(instruction)[1])
    return [
        code[at]
        for at, known in written.items()
        if _uniform(code[at])[0] - known and not _is_idle_move(code, at)
    ]


def _made_before(
    code: list[str], labels: Labels, made: Callable[[str], frozenset[int]]
) -> dict[int, frozenset[int]]:
    """What the instructions on every path to an instruction have written, by its index."""
    before: dict[int, frozenset[int]] = {0: frozenset()}
    waiting = [0]
    while waiting:
        at = waiting.pop()
        after = before[at] | made(code[at])
        for next_one in _successors(code, labels, at):
            known = after & before.get(next_one, after)
            if known != before.get(next_one):
                before[next_one] = known
                waiting.append(next_one)
    return before


def _stores(instruction: str) -> frozenset[int]:
    """The words that it spills; words stored under a predicate are loaded under it."""
    kind, words = _spilled(instruction)
    return words if kind == "STL" else _NONE


@functools.cache
def _uniform(instruction: str) -> tuple[frozenset[int], frozenset[int]]:
    """The numbers of the uniform registers that it reads and writes, even under a predicate."""
    if "UR" not in instruction:
        return _NONE, _NONE
    operation, _, rest = re.sub(r"^@!?U?P\w+ ", "", instruction).partition(" ")
    name = operation.split(".")[0]
    wide = name in ("UIADD3", "UMOV", "USHF", "ULDC", "R2UR") and ".64" in operation
    operands = re.findall(r"(?:[^,\[]|\[[^\]]*\])+", rest)
    reads: set[int] = set()
    writes: set[int] = set()
    for operand in operands:
        for register in map(int, re.findall(r"\bUR(\d+)", operand)):
            if "gdesc" in operand:  # of both operands, or of the second
                first = 2 if re.match(r" *R\d", operands[1]) else 0
                reads |= set(range(register + first, register + 4))
            elif tensor := re.match(r"UTMA(?:LDG|STG)\.(\d)D", operation):
                # places in shared memory and in the tensor; or the descriptor's address
                more = int(tensor[1]) if operand is operands[0] else 1
                reads |= set(range(register, register + 1 + more))
            elif not writes and re.match(r"U(?!TMA|BLK|ISETP)|R2UR|S2UR|VOTEU|CS2UR|REDUX", name):
                writes |= {register, register + (wide or ".WIDE" in operation)}
            else:
                reads |= {register, register + (wide or "desc" in operand)}
    return frozenset(reads), frozenset(writes)


def _is_idle_move(code: list[str], at: int) -> bool:
    """Whether it moves something to a uniform register that is overwritten before it is used."""
    if not code[at].startswith("UMOV "):
        return False
    (moved,) = _uniform(code[at])[1]
    for later in range(at + 1, len(code)):
        reads, writes = _uniform(code[later])
        if "BRA" in code[later] or (moved in reads and not _is_idle_move(code, later)):
            return False
        if moved in writes:
            return not code[later].startswith("@")
    return False


def _spilled(instruction: str) -> tuple[str | None, frozenset[int]]:
    """Whether it stores or loads spilled words, and their numbers."""
    if "LDL" not in instruction and "STL" not in instruction:  # nearly all: skip the regex
        return None, _NONE
    found = re.match(r"(?:@!?U?P\w+ )?(LDL|STL)(\S*) .*\[R1(?:\+(0x\w+))?\]", instruction)
    if not found:
        return None, _NONE
    size = 16 if "128" in found[2] else 8 if "64" in found[2] else 4
    first = int(found[3] or "0", 16) // 4 * 4  # half a word may be loaded
    return found[1], frozenset(range(first, first + size, 4))


def _successors(code: list[str], labels: Labels, at: int) -> list[int]:
    """The instructions that may be executed after one."""
    if not code[at].startswith(_MAY_END):
        return [at + 1] * (at + 1 < len(code))
    operation = re.sub(r"^@!?U?P\w+ ", "", code[at])
    jumps = operation.startswith(("BRA", "BRX"))
    ends = operation.startswith(("EXIT", "RET"))
    goes_on = code[at].startswith("@") or not (jumps or ends)
    named = re.findall(r"\.L_x_\d+", operation) if jumps else []
    return [labels[name] for name in named] + [at + 1] * (goes_on and at + 1 < len(code))


def _is_idle(code: list[str], at: int, word: int) -> bool:
    """Whether a loaded word is never used."""
    found = re.search(r"LDL\S* R(\d+)", code[at])
    assert found, code[at]
    return _ends(code, at, f"R{int(found[1]) + (word - min(_spilled(code[at])[1])) // 4}")


def _ends(code: list[str], at: int, register: str) -> bool:
    """Whether a register, or some of its bits, are overwritten before anything else uses it."""
    even = f"R{int(register[1:]) // 2 * 2}"  # names a pair; products name larger tuples
    named = rf"\b{register}\b|\.(?:64|128)\b.*\b{even}\b|HGMMA"
    uses = (i for i in range(at + 1, len(code)) if re.search(named, code[i]))
    use = next(uses, None)
    text = "" if use is None else code[use]
    copy = re.match(rf"(?:IMAD\.MOV\.U32 (R\d+), RZ, RZ,|MOV (R\d+),) {register}\b", text)
    if use is not None and copy and (copy[1] or copy[2]) != register:
        return _ends(code, use, copy[1] or copy[2]) and _ends(code, use, register)
    changes_bits = text.startswith(f"LOP3.LUT {register}, {register}, 0xffff")
    is_made = re.match(rf"(?:IMAD|IADD3|LOP3|MOV|LDL|LDS|S2R|LEA|SHF)\S* {register}, ", text)
    return changes_bits or bool(is_made and text.count(register) == 1)


def disassemble(compiled: Any, tmp_path: Path) -> list[tuple[int, str]]:
    """Addresses and instructions of a kernel; jumps name addresses."""
    text = dump(compiled, tmp_path, "-c", "nvdisasm")
    label = r"^\s*(\.L_x_\d+):(?=(?:\s*\.L_x_\d+:)*\s*/\*([0-9a-f]+)\*/)"
    labels = re.findall(label, text, re.MULTILINE)
    places = {f"`({name})": f"0x{address.lstrip('0') or '0'}" for name, address in labels}
    lines = re.findall(r"/\*([0-9a-f]{4,5})\*/\s+(.*?);", text)
    return [
        (int(address, 16), re.sub(r"`\(\.L_x_\d+\)", lambda found: places[found[0]], instruction))
        for address, instruction in lines
    ]


def loops_with(instruction: str, code: list[tuple[int, str]]) -> list[list[str]]:
    """Innermost loops with an instruction, as lists of instructions."""
    loops = []
    for address, text in code:
        jump = re.search(r"\bBRA 0x([0-9a-f]+)", text)
        if jump and int(jump[1], 16) < address:
            loops.append((int(jump[1], 16), address))
    inner = [
        (first, last)
        for first, last in loops
        if not any(first <= a and b < last for a, b in loops if (a, b) != (first, last))
    ]
    bodies = [[text for address, text in code if a <= address <= b] for a, b in inner]
    return [body for body in bodies if any(instruction in text for text in body)]


def loops_that_multiply(code: list[tuple[int, str]]) -> list[list[str]]:
    """Innermost loops with tensor core products."""
    return loops_with("HGMMA", code)
