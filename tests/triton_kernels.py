"""A Triton kernel whose captured parameters test_audit_gpu.py knows. Imported there alone, where Triton is installed."""

import triton
import triton.language as tl


@triton.jit
def double_it(source, target, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + at, tl.load(source + at, mask=at < count) * 2, mask=at < count)
