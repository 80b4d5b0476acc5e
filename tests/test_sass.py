"""Machine code for Hopper: nothing touches registers that the matrix unit may still use, and it need not wait."""

import re

import pytest
from helpers import ROOT, run

pytest.importorskip("triton.backends.nvidia", reason="Triton has no wheel for this system")

from sass import hazards, waits  # noqa: E402

LOOP = """
.L_x_1:
        /*0100*/                   LDSM.16.M88.4 R8, [R2] ;
        /*0110*/                   WARPGROUP.ARRIVE ;
        /*0120*/                   HGMMA.64x16x16.F32 R24, R{first}, gdesc[UR4].tnspB, R24, gsb0 ;
        /*0130*/                   HMUL2 R{other}, R2, R3 ;
        /*0140*/                   WARPGROUP.DEPBAR.LE gsb0, {left} ;
        /*0150*/              @P0  BRA `(.L_x_1) ;
        /*0160*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*0170*/                   STG.E desc[UR2][R4.64], R24 ;
        /*0180*/                   EXIT ;
"""


def test_what_is_written_too_early_is_found():
    code = lambda **names: LOOP.format(**{"first": 8, "other": 12, "left": "0x0", **names})
    assert hazards(code()) == []
    assert hazards(code(left="0x1")) == ["LDSM.16.M88.4 R8, [R2]"]  # by the next turn of the loop
    assert hazards(code(left="0x1", first=4)) == []
    assert waits(code()) == 1 and waits(code(left="0x1")) == 0
    assert hazards(code(other=11)) == ["HMUL2 R11, R2, R3"]  # an operand
    assert hazards(code(other=31)) == ["HMUL2 R31, R2, R3"]  # a sum
    assert hazards(code().replace("R2, R3", "R2, R27")) == ["HMUL2 R12, R2, R27"]  # a sum that is read
    assert hazards(code().replace("gsb0, 0x0 ;\n        /*0170", "gsb0, 0x1 ;\n        /*0170")) == []  # none is left


SOME = ("forward", "query_state", "query_gradient", "update_state")  # with operands in registers
OTHERS = ("update_square", "query_gradient_of_products", "dq", "dkdv")
ALL = r"(update|query)_\w+ chunked|_kernel.\w+ chunked bfloat16 64 2|many_sequences"


@pytest.mark.parametrize(
    "pattern,kernels",
    [
        (
            f"({'|'.join(SOME)}) chunked bfloat16 64 2|query_gradient_of_pairs|linear",
            (*SOME, "query_gradient_of_pairs", "linear"),
        ),
        pytest.param(ALL, SOME + OTHERS, marks=pytest.mark.slow),
        pytest.param("heinsen", ("chunk_sums", "forward", "dq", "dkdv"), marks=pytest.mark.slow),
    ],
)
def test_no_kernel_writes_what_the_matrix_unit_reads_or_waits_for_each_product(pattern, kernels):
    """With the installed Triton, ptxas must not have serialized any products (C7510 and others)."""
    done = run(f"{ROOT}/tests/sass.py", pattern, check=False, env={"TRITON_INTERPRET": None})
    assert done.returncode == 0, done.stdout + done.stderr
    rows = re.findall(r"^[\w.]+\.(\w+) (.*): (\d+) products, (\d+) waits, 0 hazards$", done.stdout, re.M)
    assert {name for name, _, products, _ in rows if int(products)} >= {*kernels}
    for name, case, products, waiting in rows:  # flush has three products
        assert 2 * int(waiting) <= int(products) or name == "flush" or case.startswith("heinsen"), done.stdout
