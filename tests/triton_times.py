"""A Triton kernel for test_other_libraries.py. In a file: Triton reads its source. Imported only where Triton is installed."""

import triton
import triton.language as tl


@triton.jit
def times(x, table, out, size, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    tl.store(out + place, tl.load(x + place, mask=inside) * tl.load(table + place, mask=inside), mask=inside)
