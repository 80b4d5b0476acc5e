"""Update state and query gradient for Hopper GPUs in Gluon: products run while the next operand is made.

The same arrays and results as those of `update_state` and `query_gradient` for p = 2 and D = 64,
bfloat16 rows, float16 between kernels. Triton's wait at the end of each turn (`common.wait_for_products`) leaves the
matrix unit without work while the next turn's operand is made in registers; here one product is always in flight, also
over the barriers:

    matrix unit     | product 0       | product 1       | product 2       |
    registers       | operand 1       | operand 2       | operand 3       |    an operand may be written again
    copies, shared  | rows for a later step, without waiting               |    when its own product is done

A step needs one barrier: what is copied in it was last read two steps ago. One program is one warpgroup (4 warps), and
two programs share an SM. Gluon's interface differs between Triton's versions, and Triton's interpreter does not
run it.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy as copies
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

# Triton 3.6's name and that of later versions
copy = getattr(copies, "async_load", None) or copies.async_copy_global_to_shared
barrier = getattr(gl, "barrier", None) or gl.thread_barrier

D: gl.constexpr = gl.constexpr(64)
BM: gl.constexpr = gl.constexpr(128)  # rows of a program of query_gradient
MMA: gl.constexpr = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
A: gl.constexpr = gl.constexpr(gl.DotOperandLayout(0, MMA.value, 2))
ROWS: gl.constexpr = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))  # 16 bytes a thread
SWIZZLED: gl.constexpr = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
PLAIN: gl.constexpr = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))


# ---- update state


@gluon.constexpr_function
def _operand(k):
    """Return the layout of 4 slots of 16 features and k tokens, as the matrix unit takes an operand from registers."""
    tokens = [[0, 0, 16 << n] for n in range((k // 16).bit_length() - 1)]
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 1], [0, 8, 0], [0, 0, 8], *tokens],
        lane_bases=[[0, 0, 2], [0, 0, 4], [0, 1, 0], [0, 2, 0], [0, 4, 0]],
        warp_bases=[[1, 0, 0], [2, 0, 0]],
        block_bases=[],
        shape=[4, 16, k],
    )


@gluon.constexpr_function
def _rows(operand, rows, row):
    """Return the layout [rows, tokens] of what is multiplied into `operand`; row(slot, entry): its row there."""
    two = lambda bases: [[row(*basis[:2]), basis[2]] for basis in bases]
    shape = [rows, operand.shape[2]]
    return gl.DistributedLinearLayout(
        two(operand.reg_bases), two(operand.lane_bases), two(operand.warp_bases), [], shape
    )


@gluon.constexpr_function
def _slices(operand):
    """Return the layout [64, K] of the slices of a tile's slots."""
    return _rows(operand, 64, lambda slot, entry: 16 * slot + entry)


@gluon.constexpr_function
def _scalars(operand):
    """Return the layout [4, K] of the scalars of a tile's slots."""
    return _rows(operand, 4, lambda slot, entry: slot)


@gluon.jit
def _column_features(x, scalars, K: gl.constexpr, OPERAND: gl.constexpr):
    """Return [64, K]: each 16 rows of x [4, 16, K] times a scalar of the token, scalars [4, K] in shared memory."""
    s = scalars.load(_scalars(OPERAND))
    s = gl.expand_dims(gl.convert_layout(s, gl.SliceLayout(1, OPERAND), assert_trivial=True), 1)
    return gl.convert_layout((x * s).reshape([64, K]), A, assert_trivial=True)


@gluon.jit
def _places(part, i, TP, K: gl.constexpr):
    """Return where a step's copies are from: entries of the slices, scalars in the order (tile, slot), of values."""
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [256 // K, K // 8], [4, 1], [1, 0])
    t = gl.arange(0, K, gl.SliceLayout(0, COPY))[None, :]
    entry = gl.arange(0, 64, gl.SliceLayout(1, COPY))
    x_at = (gl.load(part + entry // 16) + entry % 16)[:, None] * TP + t
    n = gl.arange(0, 16, gl.SliceLayout(1, COPY))
    s_at = (gl.load(part + 4 + n % 4) + i + n // 4)[:, None] * TP + t
    token, column = gl.arange(0, K, gl.SliceLayout(1, ROWS)), gl.arange(0, D, gl.SliceLayout(0, ROWS))
    return x_at, s_at, token[:, None] * D + column[None, :]


@gluon.jit
def _store_tiles(U, acc0, acc1, acc2, acc3, down):
    """Write four tiles [64, D] to U, one after another."""
    n, column = gl.arange(0, 64, gl.SliceLayout(1, ROWS)), gl.arange(0, D, gl.SliceLayout(0, ROWS))
    to = U + n[:, None] * D + column[None, :]
    gl.store(to, gl.convert_layout((acc0 * down).to(gl.float16), ROWS))
    gl.store(to + 64 * D, gl.convert_layout((acc1 * down).to(gl.float16), ROWS))
    gl.store(to + 128 * D, gl.convert_layout((acc2 * down).to(gl.float16), ROWS))
    gl.store(to + 192 * D, gl.convert_layout((acc3 * down).to(gl.float16), ROWS))


@gluon.jit
def _stages(K: gl.constexpr, N: gl.constexpr):
    """Return N stages of shared memory for a step's entries of slices, scalars and values."""
    xs = gl.allocate_shared_memory(gl.float16, [N, 64, K], SWIZZLED)
    ss = gl.allocate_shared_memory(gl.float16, [N, 16, K], PLAIN)
    vs = gl.allocate_shared_memory(gl.float16, [N, K, D], SWIZZLED)
    return xs, ss, vs


@gluon.jit
def _copy_tokens(XT, VALUES, places, row, start, TP, to, stage, inside, K: gl.constexpr):
    """Copy what a step needs, K tokens from `start` of a sequence and head, into a stage, if `inside`; do not wait."""
    x_at, s_at, v_at = places
    xs, ss, vs = to
    row, start = gl.cast(row, gl.int64), start // K * K
    XT += row * (D * TP) + start
    copy(xs.index(stage), XT + x_at, mask=inside)
    copy(ss.index(stage), XT + s_at, mask=inside)
    copy(vs.index(stage), VALUES + (row * TP + start) * D + v_at, mask=inside)
    copies.commit_group()


@gluon.jit
def _next_tokens(row, start, begin, end, K: gl.constexpr):
    """Return the next step's row and first token: those after the last are of the next head."""
    last = start + K == end
    return gl.where(last, row + 1, row), gl.where(last, begin, start + K)


@gluon.jit(do_not_specialize=["T", "TP", "CHUNK", "H", "HKV", "tiles", "F"])
def update_state_kernel(
    XT, VALUES, U, PARTS, GROUPS, down, T, TP, CHUNK, H, HKV, tiles, F,
    K: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Write four tiles of one chunk's U, summed over the query heads of a group (one head of keys if H = HKV)."""
    TP, F = TP // 256 * 256, F // 64 * 64
    HALF: gl.constexpr = STAGES // 2
    AHEAD: gl.constexpr = STAGES - 3  # odd: a step copies for one of the other half
    OPERAND: gl.constexpr = _operand(K)
    at, number = gl.program_id(0) // (tiles // 4), gl.program_id(0) % (tiles // 4)
    chunks = (T + CHUNK - 1) // CHUNK
    bh, chunk = at // chunks, at % chunks
    part, i = PARTS + gl.load(GROUPS + number * 2) * 16, gl.load(GROUPS + number * 2 + 1)
    places = _places(part, i, TP, K)
    heads = H // HKV
    row, begin = bh // HKV * H + bh % HKV * heads, chunk * CHUNK
    end = gl.minimum(begin + CHUNK, TP)
    total, start = (end - begin) // K * heads, begin  # total is even
    # Two arrays: Triton sees that what is copied and what is read in a step are apart, and adds no barriers.
    halves = _stages(K, HALF), _stages(K, HALF)
    for n in gl.static_range(AHEAD):
        _copy_tokens(XT, VALUES, places, row, start, TP, halves[n % 2], n // 2, n < total, K)
        row, start = _next_tokens(row, start, begin, end, K)
    acc0 = gl.zeros([64, D], gl.float32, MMA)
    acc1 = gl.zeros([64, D], gl.float32, MMA)
    acc2 = gl.zeros([64, D], gl.float32, MMA)
    acc3 = warpgroup_mma_init(gl.zeros([64, D], gl.float32, MMA))
    a3 = gl.zeros([64, K], gl.float16, A)
    gl.assume(total > 0)  # else ptxas lets no product run on while the next is prepared
    for step in range(0, total, 2):
        for n in gl.static_range(2):
            copies.wait_group(AHEAD - 1)
            barrier()  # all warps see what was copied, and no product reads the stage of two steps ago
            xs, ss, vs = halves[n]
            stage = step // 2 % HALF
            x = xs.index(stage).load(_slices(OPERAND)).reshape([4, 16, K])
            x = gl.convert_layout(x, OPERAND, assert_trivial=True)
            v, s = vs.index(stage), ss.index(stage)
            a0 = _column_features(x, s.slice(0, 4), K, OPERAND)
            acc0 = warpgroup_mma(a0, v, acc0, is_async=True)
            acc3, a3 = warpgroup_mma_wait(1, [acc3, a3])
            a1 = _column_features(x, s.slice(4, 4), K, OPERAND)
            acc1 = warpgroup_mma(a1, v, acc1, is_async=True)
            acc0, a0 = warpgroup_mma_wait(1, [acc0, a0])
            ahead = step + n + AHEAD
            to = halves[(n + AHEAD) % 2]
            _copy_tokens(XT, VALUES, places, row, start, TP, to, ahead // 2 % HALF, ahead < total, K)
            row, start = _next_tokens(row, start, begin, end, K)
            a2 = _column_features(x, s.slice(8, 4), K, OPERAND)
            acc2 = warpgroup_mma(a2, v, acc2, is_async=True)
            acc1, a1 = warpgroup_mma_wait(1, [acc1, a1])
            a3 = _column_features(x, s.slice(12, 4), K, OPERAND)
            acc3 = warpgroup_mma(a3, v, acc3, is_async=True)
            acc2, a2 = warpgroup_mma_wait(1, [acc2, a2])
    acc3, a3 = warpgroup_mma_wait(0, [acc3, a3])
    _store_tiles(U + gl.cast(at, gl.int64) * F + number * (256 * D), acc0, acc1, acc2, acc3, down)


# ---- query gradient


@gluon.jit
def _times_state(v, XT, S, WHERE, TP):
    """Return [BM, D]: the sum over entries i of (v x_i) S_i^T.

    v [BM, D]; XT: the first of BM columns; S_i: the rows of the state that hold the products of entry i with all
    others. Two entries are a step, and four steps a turn; what is copied in a step is for the step after the next.
    """
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    GATHER: gl.constexpr = gl.BlockedLayout([4, 8], [4, 8], [4, 1], [1, 0])  # a thread loads four rows' numbers at once
    xs = gl.allocate_shared_memory(gl.float16, [8, 8, BM], PLAIN)
    # Four arrays: Triton sees that what is copied and what is read in a step are apart, and adds no barriers.
    ss = (
        gl.allocate_shared_memory(gl.float16, [2 * D, D], SWIZZLED),
        gl.allocate_shared_memory(gl.float16, [2 * D, D], SWIZZLED),
        gl.allocate_shared_memory(gl.float16, [2 * D, D], SWIZZLED),
        gl.allocate_shared_memory(gl.float16, [2 * D, D], SWIZZLED),
    )
    entry, t = gl.arange(0, 8, gl.SliceLayout(1, COPY)), gl.arange(0, BM, gl.SliceLayout(0, COPY))
    for i in gl.static_range(8):
        copy(xs.index(i), XT + (i * 8 + entry)[:, None] * TP + t[None, :])
    where = WHERE + gl.arange(0, 2 * D, gl.SliceLayout(1, GATHER))
    S += gl.arange(0, D, gl.SliceLayout(0, GATHER))[None, :]
    for i in gl.static_range(2):
        copy(ss[i], S + gl.load(where + i * (2 * D))[:, None] * D)
        copies.commit_group()
    rows = gl.load(where + 2 * (2 * D))
    acc, last = gl.zeros([BM, D], gl.float32, MMA), v
    for turn in range(8):
        for step in gl.static_range(4):
            copies.wait_group(1)
            barrier()  # all warps see what was copied, and no product reads the stage of two steps ago
            for i in gl.static_range(2):
                vx = v * xs.index(turn).slice(2 * step + i, 1).permute([1, 0]).load(A)
                acc = warpgroup_mma(vx, ss[step].slice(i * D, D).permute([1, 0]), acc, is_async=True)
                acc, last = warpgroup_mma_wait(1, [acc, last])
                last = vx
                if i == 0:
                    ahead = 4 * turn + step + 2
                    copy(ss[(step + 2) % 4], S + rows[:, None] * D, mask=ahead < D // 2)
                    copies.commit_group()
                    rows = gl.load(where + gl.minimum(ahead + 1, D // 2 - 1) * (2 * D))
    acc, last = warpgroup_mma_wait(0, [acc, last])
    return acc


@gluon.jit
def _first_8_bits(x):
    return (x.to(gl.int32, bitcast=True) & -65536).to(gl.float32, bitcast=True)


@gluon.jit
def _times_square(x, Z):
    """Return x @ Z [BM, D], exact to float32, for bfloat16 x and Z [D, D] float32 in three pieces, the smallest first.

    This is `common.exact_product`.
    """
    k, e = gl.arange(0, D, gl.SliceLayout(1, ROWS)), gl.arange(0, D, gl.SliceLayout(0, ROWS))
    z = gl.load(Z + k[:, None] * D + e[None, :])
    high = _first_8_bits(z)
    middle = _first_8_bits(z - high)
    zs = gl.allocate_shared_memory(gl.bfloat16, [3, D, D], SWIZZLED)
    zs.index(0).store((z - high - middle).to(gl.bfloat16))
    zs.index(1).store(middle.to(gl.bfloat16))
    zs.index(2).store(high.to(gl.bfloat16))
    fence_async_shared()
    barrier()
    acc = gl.zeros([BM, D], gl.float32, MMA)
    for piece in gl.static_range(3):
        acc = warpgroup_mma(x, zs.index(piece), acc)
    return acc


@gluon.jit
def _reflected(x, MIRROR, head):
    """Return x [BM, D] with each row reflected, as `common.reflected` does."""
    u = gl.load(MIRROR + head * D + gl.arange(0, D, gl.SliceLayout(0, MMA)))[None, :]
    return x - 2 * gl.sum(x * u, 1)[:, None] * u


@gluon.jit(do_not_specialize=["T", "TP", "CHUNK", "H", "HKV", "tiles", "skip"])
def query_gradient_kernel(
    XT, VALUES, S, UNIT_S, UNIT_V, UNIT_X, WHERE, OUT, X, Z, WEIGHT, MIRROR, READ, x_strides,
    T, TP, CHUNK, H, HKV, tiles, skip,
    DOWN: gl.constexpr,
):  # fmt: skip
    """Add BM rows of the gradient to OUT, and write READ, as `query_gradient.query_gradient_kernel` does."""
    TP = TP // 256 * 256
    blocks = (T + BM - 1) // BM
    bh, lo = gl.program_id(0) // blocks, gl.program_id(0) % blocks * BM
    b, h, chunk = gl.cast(bh // H, gl.int64), bh % H, lo // CHUNK
    head = bh // H * HKV + h // (H // HKV)
    state = gl.cast(head * ((T + CHUNK - 1) // CHUNK) + chunk, gl.int64)
    first = gl.cast(bh, gl.int64) * TP + lo
    row, d = gl.arange(0, BM, gl.SliceLayout(1, A)), gl.arange(0, D, gl.SliceLayout(0, A))
    acc = gl.zeros([BM, D], gl.float32, MMA)
    if chunk != skip:
        v = gl.load(VALUES + first * D + row[:, None] * D + d[None, :]) * (1 / DOWN)
        acc = _times_state(v, XT + gl.cast(bh, gl.int64) * D * TP + lo, S + state * tiles * (64 * D), WHERE, TP)
    of_row = gl.arange(0, BM, gl.SliceLayout(1, MMA))
    # twice, since an entry is on both sides of a product
    unit = gl.load(UNIT_X + first + of_row) * (2 * DOWN) / (gl.load(UNIT_S + state) * gl.load(UNIT_V + state))
    acc *= unit[:, None]
    if MIRROR is not None:
        acc = _reflected(acc, MIRROR, head)
    X += b * x_strides[0] + gl.cast(h, gl.int64) * x_strides[2] + gl.cast(lo, gl.int64) * x_strides[1]
    x = gl.load(X + row[:, None] * x_strides[1] + d[None, :] * x_strides[3], mask=lo + row[:, None] < T, other=0.0)
    zx = _times_square(x, Z + state * (D * D))
    if WEIGHT is not None:
        zx *= gl.load(WEIGHT + first + of_row)[:, None]
    dx = gl.convert_layout(acc + 2 * zx, ROWS)
    row, d = gl.arange(0, BM, gl.SliceLayout(1, ROWS)), gl.arange(0, D, gl.SliceLayout(0, ROWS))
    inside = (lo + row < T)[:, None]
    if READ is not None:
        x = gl.load(X + row[:, None] * x_strides[1] + d[None, :] * x_strides[3], mask=inside, other=0.0)
        gl.store(READ + first + row, 0.5 * gl.sum(dx * x.to(gl.float32), 1))
    to = OUT + ((b * T + lo) * H + h) * D + row[:, None] * (H * D) + d[None, :]
    dx += gl.load(to, mask=inside, other=0.0).to(gl.float32)
    gl.store(to, dx.to(OUT.dtype.element_ty), inside)
