"""Compile the kernels for Hopper without a GPU, and look at how they use its matrix unit.

A product (HGMMA) runs on while the program does other things, until a wait (WARPGROUP.DEPBAR.LE gsb0, N: all but the
last N groups of products are done). Until then its sums must not be read or written, and its first operand must not be
written if that is in registers. Triton 3.6 to 3.8 gets the second wrong in some loops (triton issue 9433): results then
differ from run to run, or not, as timing has it. Such instructions are hazards. Where registers do not suffice, ptxas
waits behind each product for its result ("serialized", C7510 and others), and the matrix unit idles.

    python tests/sass.py                    # compile attention's kernels; print products, waits, hazards, ptxas's words
    python tests/sass.py "query.* 64 2"     # only where kernel, dtype, head dimension and p match, tile sizes an H200's
"""

import contextlib
import io
import re
import sys
from tempfile import TemporaryDirectory

import targets
import torch
from triton import knobs

from sympow.kernels.decode import power
from sympow.kernels.decode.cache import Cache
from sympow.kernels.decode.linear import Linear, linear

# instructions that do not write to their first operand
NO_RESULT = set("BAR BRA DEPBAR EXIT FENCE LDGDEPBAR LDGSTS MEMBAR STG STL STS STSM SYNCS".split())


def waits(sass):
    """Return behind how many of its products a kernel waits until all are done."""
    steps = re.findall(r"HGMMA|DEPBAR\.LE gsb0, 0x\w+", sass)
    return sum(a == "HGMMA" and b.endswith(" 0x0") for a, b in zip(steps, steps[1:]))


def hazards(sass):
    """Return the instructions, as text, that touch what they must not, on any way through the program."""
    program, labels = [], {}
    for line in sass.splitlines():
        if label := re.match(r"\s*(\.L\w+):", line):
            labels[label[1]] = len(program)
        elif instruction := re.search(r"/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", line):
            program.append(instruction[1])
    meanings = [_meaning(text) for text in program]
    # of each way: groups of products that may be in flight, oldest first, and the one still open: (sums, operands) each
    errors, seen, ways = [], set(), [(0, (), (frozenset(), frozenset()))]
    while ways:
        line, flying, group = ways.pop()
        while line < len(program):
            text, (kind, *facts) = program[line], meanings[line]
            if kind == "product":
                sums, operands, last = facts
                group = group[0] | sums, group[1] | operands
                if last:
                    flying, group = (*flying, group), (frozenset(), frozenset())
            elif kind == "wait":
                flying = flying[-facts[0] :] if facts[0] else ()
            else:
                written, read = facts
                if any(written & (sums | operands) or read & sums for sums, operands in (*flying, group)):
                    errors.append(text)
            jump = re.search(r"BRA.*`\((\.L\w+)\)", text)
            if jump or "EXIT" in text:
                if (line, flying, group) in seen:
                    break
                seen.add((line, flying, group))
                if jump:
                    ways.append((labels[jump[1]], flying, group))
                if not text.startswith("@"):
                    break
            line += 1
    return sorted(set(errors))


def _meaning(text):
    """Return ("product", sums, operands in registers, ends its group), ("wait", groups left) or
    ("other", registers written, registers read)."""
    name, _, rest = re.sub(r"^@!?U?P\w+\s+", "", text).partition(" ")
    operands = [x.strip() for x in rest.split(",")]
    kind, *modifiers = name.split(".")
    number = lambda x: int(m[1]) if (m := re.match(r"[-|~!]*R(\d+)", x)) else None
    if kind == "HGMMA":
        width = int(re.search(r"\.64x(\d+)x", name)[1])
        sums, first = number(operands[0]), number(operands[1])
        registers = lambda first, n: frozenset() if first is None else frozenset(range(first, first + n))
        return "product", registers(sums, width // 2), registers(first, 4), "gsb0" in operands
    if name.startswith("WARPGROUP.DEPBAR"):
        return "wait", int(operands[1], 16)
    written = frozenset()
    if kind not in NO_RESULT:
        while operands and re.fullmatch(r"!?U?P\w+", operands[0]):
            operands.pop(0)
        first = number(operands[0]) if operands else None
        if first is not None:
            wide = 4 if "128" in modifiers or name.endswith("M88.4") or name.endswith("MT88.4") else 1
            wide = 2 if {"64", "WIDE", "2"} & set(modifiers) or kind in ("CS2R", "DADD", "DFMA", "DMUL") else wide
            written, operands = frozenset(range(first, first + wide)), operands[1:]
    return "other", written, frozenset(int(n) for x in operands for n in re.findall(r"\bR(\d+)", x))


def many_sequences():
    """Run the kernels of generation with products, for 64 sequences."""
    weight, x = torch.zeros(768, 768, dtype=torch.bfloat16), torch.zeros(64, 768)
    linear(Linear(weight), x, x)
    k, sums = torch.zeros(64, 64, 12, 64, dtype=torch.bfloat16), torch.zeros(64, 64, 12, dtype=torch.float64)
    state = power.State(torch.zeros(64, 12, 2080, 64), torch.zeros(64, 12, 2080))
    power.flush(Cache(k, k, sums, sums.int(), None), 64, state, 2)


CASES = [
    *((targets.chunked, torch.bfloat16, D, p, True) for D, p in ((64, 2), (16, 4), (32, 4), (64, 4), (128, 2))),
    *(case for case in targets.TRAINING if case[0] is targets.heinsen),
    (many_sequences,),
]


def main(pattern=""):
    """Print a line and the faults of each launch, if its kernel and case match a pattern; return the number of faults.

    Kernels in Triton's cache are compiled anew, for ptxas's words about products that it serializes.
    """
    knobs.compilation.always_compile = knobs.nvidia.dump_ptxas_log = True
    faults, codes = 0, set()
    with TemporaryDirectory() as folder, targets.pretended("sm_90"):
        for kernel, case, compile in targets.launches("sm_90", CASES):
            if not re.search(pattern, f"{kernel} {case}"):
                continue
            with contextlib.redirect_stdout(io.StringIO()) as log:
                cubin = compile().asm["cubin"]
            if cubin in codes:
                continue
            codes.add(cubin)
            losses = re.findall(r"\(C75\d\d\) .*serialized.*", log.getvalue())
            sass = targets.inspect_code("nvdisasm", "-c", cubin=cubin, folder=folder)
            errors = hazards(sass)
            numbers = f"{sass.count('HGMMA')} products, {waits(sass)} waits, {len(errors)} hazards"
            print(f"{kernel} {case}: {numbers}", *errors[:3], *losses, sep="\n    ")
            faults += len(errors) + len(losses)
    return faults


if __name__ == "__main__":
    sys.exit(bool(main(*sys.argv[1:])))
