"""Scale keys for p = 6 and 8: a power of two for each row, of the largest key up to it in its document.

    key_scale_i = 2^-e,  e = the exponent of the largest entry of k_j over j <= i in i's document

One program reads the keys of one sequence and head, 128 rows at a time, and carries the largest exponent along.
Cost: keys are read once. The limit is latency, as one program goes through all tokens.
"""

import triton
import triton.language as tl

from ..common import ROW_EXPONENT, add, at_head, load_rows, log_gates, maximum


@triton.jit(do_not_specialize=["g_b", "g_t", "g_h", "T", "HKV"])  # in a tuple they would be specialized
def key_scale_kernel(K, LOG_G, KEY_SCALE, k_strides, g_b, g_t, g_h, T, HKV, D: tl.constexpr, N: tl.constexpr):
    """Write for each row of a sequence and head of keys the power of two that brings the largest key up to it in its
    document into [1, 2); it is between 2^-ROW_EXPONENT and 2^ROW_EXPONENT."""
    b, h = tl.program_id(0) // HKV, tl.program_id(0) % HKV
    documents, largest = 0, 0
    for start in range(0, T, N):
        token = start + tl.arange(0, N)
        k = load_rows(K, k_strides, b, start, h, T, N, D).to(tl.float32).to(tl.int32, bitcast=True)
        exponent = tl.max((k >> 23) & 255, 1)
        if LOG_G is not None:  # exponents of a document are above all of the documents before
            log_g = LOG_G + tl.cast(b, tl.int64) * g_b + tl.cast(h, tl.int64) * g_h
            reset = log_gates(log_g, g_t, token, T)[1].to(tl.int32)
            exponent += (documents + tl.associative_scan(reset, 0, add)) * 256
            documents += tl.sum(reset, 0)
        exponent = tl.maximum(tl.associative_scan(exponent, 0, maximum), largest)
        largest = tl.max(exponent, 0)
        exponent = tl.minimum(tl.maximum(exponent % 256, 127 - ROW_EXPONENT), 127 + ROW_EXPONENT)
        tl.store(at_head(KEY_SCALE, T, tl.program_id(0)) + token, ((254 - exponent) << 23).to(tl.float32, bitcast=True))
