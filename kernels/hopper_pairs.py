"""query gradient of pairs in Gluon: the next tile's product runs while this tile's is multiplied by entries."""
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy as copies
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

copy = getattr(copies, "async_load", None) or copies.async_copy_global_to_shared
barrier = getattr(gl, "barrier", None) or gl.thread_barrier

D: gl.constexpr = gl.constexpr(64)
BM: gl.constexpr = gl.constexpr(64)
STAGES: gl.constexpr = gl.constexpr(4)
MMA: gl.constexpr = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
A: gl.constexpr = gl.constexpr(gl.DotOperandLayout(0, MMA.value, 2))
ROWS: gl.constexpr = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
ROWS1: gl.constexpr = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [1, 4], [1, 0]))
SWIZZLED: gl.constexpr = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
PLAIN: gl.constexpr = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
PLAIN3: gl.constexpr = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))
PLAIN4: gl.constexpr = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [3, 2, 1, 0]))
# [BM, 8, 4, 2] of [BM, 64]: columns are 8 k + 2 slot + e
W4: gl.constexpr = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 0, 1], [8, 0, 0, 0], [0, 1, 0, 0], [0, 2, 0, 0], [0, 4, 0, 0]],
        lane_bases=[[0, 0, 1, 0], [0, 0, 2, 0], [1, 0, 0, 0], [2, 0, 0, 0], [4, 0, 0, 0]],
        warp_bases=[[16, 0, 0, 0], [32, 0, 0, 0]],
        block_bases=[],
        shape=[64, 8, 4, 2],
    )
)
SLOTS: gl.constexpr = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[8, 0]], lane_bases=[[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], warp_bases=[[16, 0], [32, 0]],
        block_bases=[], shape=[64, 4],
    )
)  # fmt: skip


@gluon.jit
def _entries(x):
    """Return the 16 entries [BM, 4] of the slots of x [BM, 64]."""
    halves = (x.reshape([BM, 2, 2, 2, 4, 2]).permute([0, 4, 1, 2, 3, 5]),)
    for i in gl.static_range(4):
        parts = ()
        for j in gl.static_range(2**i):
            a, b = gl.split(halves[j])
            parts = parts + (a, b)
        halves = parts
    return halves


@gluon.jit
def _scalars(T):
    """Return [BM, 64] of what 16 tiles gave to their scalars, in the order of columns."""
    parts = ()
    for j in gl.static_range(16):
        parts = parts + (T.index(2 * (4 * (j % 2) + 2 * (j // 2 % 2) + j // 4 % 2) + j // 8).load(SLOTS),)
    for level in gl.static_range(4):
        joined = ()
        for j in gl.static_range(8 // 2**level):
            joined = joined + (gl.join(parts[2 * j], parts[2 * j + 1]),)
        parts = joined
    return parts[0].permute([0, 2, 3, 4, 1, 5]).reshape([BM, 64])


@gluon.jit
def _use(w, x, to_slices, SC, T, at, i):
    """Return to_slices with a tile's sums w [BM, 64] added, and write what it gives to its scalars."""
    by = SC.index(at + i).permute([1, 0]).load(SLOTS).to(gl.float32)
    entries = _entries(w)
    t = gl.convert_layout(entries[0] * x[0], SLOTS, assert_trivial=True)
    for j in gl.static_range(1, 16):
        t = gl.convert_layout(entries[j], SLOTS, assert_trivial=True) * gl.convert_layout(x[j], SLOTS, assert_trivial=True) + t
    T.index(i).store(t)
    by = gl.convert_layout(by, gl.SliceLayout(1, gl.SliceLayout(3, W4)), assert_trivial=True)
    by = gl.expand_dims(gl.expand_dims(by, 1), 3)
    return to_slices + gl.convert_layout(w.reshape([BM, 8, 4, 2]), W4, assert_trivial=True) * by


@gluon.jit
def _copy_part(XT, TO_X, part, number, XS, SC, XP, TP, parts):
    """Copy a part's slices, scalars and places."""
    inside = number < parts
    part = gl.where(inside, part, part - 16)  # an address that exists
    c, t = gl.arange(0, 64, gl.SliceLayout(1, ROWS)), gl.arange(0, BM, gl.SliceLayout(0, ROWS))
    slot, entry = c // 2 % 4, c // 8 * 2 + c % 2
    slices = gl.load(part + slot) + entry
    copy(XS, XT + slices[:, None] * TP + t[None, :], mask=inside)
    s, t1 = gl.arange(0, 4, gl.SliceLayout(1, ROWS1)), gl.arange(0, BM, gl.SliceLayout(0, ROWS1))
    first = gl.load(part + 4 + s)
    for i in gl.static_range(16):
        copy(SC.index(number % 2 * 16 + i), XT + (first + gl.minimum(i, gl.load(part + 12) - 1))[:, None] * TP + t1[None, :], mask=inside)


@gluon.jit
def _copy_places(TO_X, number, XP):
    c, d = gl.arange(0, 64, gl.SliceLayout(1, ROWS)), gl.arange(0, D, gl.SliceLayout(0, ROWS))
    for i in gl.static_range(2):
        copy(XP.index(i), TO_X + (number * 2 + i) * (64 * D) + c[:, None] * D + d[None, :])


@gluon.jit
def _first_8_bits(x):
    return (x.to(gl.int32, bitcast=True) & -65536).to(gl.float32, bitcast=True)


@gluon.jit
def _add_to_columns(acc, x, places):
    """Return acc + x [BM, 8, 4, 2] @ places [64, D], in two pieces."""
    x = gl.convert_layout(x, A, assert_trivial=True)
    high = _first_8_bits(x)
    acc = warpgroup_mma((x - high).to(gl.bfloat16), places, acc)
    return warpgroup_mma(high.to(gl.bfloat16), places, acc)


@gluon.jit
def _times_square(x, Z):
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
    u = gl.load(MIRROR + head * D + gl.arange(0, D, gl.SliceLayout(0, MMA)))[None, :]
    return x - 2 * gl.sum(x * u, 1)[:, None] * u


@gluon.jit
def _sums(VALUES, XT, S, PARTS, TO_X, TP, tiles, parts):
    """Return [BM, D]: the sums over pairs. VALUES, XT: of the first row; S: the state."""
    vs = gl.allocate_shared_memory(gl.float16, [BM, D], SWIZZLED)
    # Four arrays: Triton sees that what is copied and what is read in a step are apart, and adds no barriers.
    ss = (
        gl.allocate_shared_memory(gl.float16, [64, D], SWIZZLED),
        gl.allocate_shared_memory(gl.float16, [64, D], SWIZZLED),
        gl.allocate_shared_memory(gl.float16, [64, D], SWIZZLED),
        gl.allocate_shared_memory(gl.float16, [64, D], SWIZZLED),
    )
    XS = gl.allocate_shared_memory(gl.float16, [64, BM], PLAIN)
    SC = gl.allocate_shared_memory(gl.float16, [32, 4, BM], PLAIN)
    XP = gl.allocate_shared_memory(gl.bfloat16, [2, 64, D], SWIZZLED)
    T = gl.allocate_shared_memory(gl.float32, [16, BM, 4], PLAIN)
    r, d = gl.arange(0, BM, gl.SliceLayout(1, ROWS)), gl.arange(0, D, gl.SliceLayout(0, ROWS))
    slot, entry = r // 2 % 4, r // 8 * 2 + r % 2
    tile = S + (slot * 16 + entry)[:, None] * D + d[None, :]
    copy(vs, VALUES + r[:, None] * D + d[None, :])
    _copy_part(XT, TO_X, PARTS, 0, XS, SC, XP, TP, parts)
    for stage in gl.static_range(STAGES):
        copy(ss[stage], tile + stage * (64 * D))
        copies.commit_group()
    acc = gl.zeros([BM, D], gl.float32, MMA)
    copies.wait_group(STAGES - 1)
    barrier()
    zero = gl.zeros([BM, D], gl.float32, MMA)
    w = warpgroup_mma(vs, ss[0].permute([1, 0]), zero, use_acc=False, is_async=True)
    done = 0
    w = warpgroup_mma_wait(0, [w])
    for number in range(parts):
        part = PARTS + number * 16
        count = gl.load(part + 12)
        x = _entries(XS.permute([1, 0]).load(MMA).to(gl.float32))
        barrier()  # before XS is written again
        _copy_part(XT, TO_X, part + 16, number + 1, XS, SC, XP, TP, parts)  # of the next group that is committed
        _copy_places(TO_X, number, XP)
        to_slices = gl.zeros([BM, 8, 4, 2], gl.float32, W4)
        for i in range(0, count, 4):
            for j in gl.static_range(4):
                copies.wait_group(STAGES - 2)
                barrier()  # all warps see what was copied, and no product reads the stage of this tile
                following = warpgroup_mma(vs, ss[(j + 1) % 4].permute([1, 0]), zero, use_acc=False, is_async=True)
                copy(ss[j], tile + gl.minimum(done + i + j + STAGES, tiles - 1) * (64 * D))
                copies.commit_group()
                to_slices = _use(w, x, to_slices, SC, T, number % 2 * 16, i + j)
                w = warpgroup_mma_wait(0, [following])
        done += count
        barrier()  # T is written
        acc = _add_to_columns(acc, to_slices.reshape([BM, 64]), XP.index(0))
        acc = _add_to_columns(acc, _scalars(T), XP.index(1))
        barrier()
    copies.wait_group(0)
    return acc


@gluon.jit(do_not_specialize=["T", "TP", "CHUNK", "H", "HKV", "tiles", "parts", "skip"])
def pairs_kernel(
    XT, VALUES, S, UNIT_S, UNIT_V, UNIT_X, PARTS, TO_X, OUT, X, Z, WEIGHT, MIRROR, READ, x_strides,
    T, TP, CHUNK, H, HKV, tiles, parts, skip,
):  # fmt: skip
    TP = TP // 256 * 256
    blocks = (T + BM - 1) // BM
    bh, lo = gl.program_id(0) // blocks, gl.program_id(0) % blocks * BM
    b, h, chunk = gl.cast(bh // H, gl.int64), bh % H, lo // CHUNK
    head = bh // H * HKV + h // (H // HKV)
    state = gl.cast(head * ((T + CHUNK - 1) // CHUNK) + chunk, gl.int64)
    first = gl.cast(bh, gl.int64) * TP + lo
    acc = gl.zeros([BM, D], gl.float32, MMA)
    if chunk != skip:
        acc = _sums(VALUES + first * D, XT + gl.cast(bh, gl.int64) * D * TP + lo, S + state * tiles * (64 * D), PARTS, TO_X, TP, tiles, parts)
    of_row = gl.arange(0, BM, gl.SliceLayout(1, MMA))
    unit = gl.load(UNIT_X + first + of_row) * 2 / (gl.load(UNIT_S + state) * gl.load(UNIT_V + state))
    acc *= unit[:, None]
    if MIRROR is not None:
        acc = _reflected(acc, MIRROR, head)
    X += b * x_strides[0] + gl.cast(h, gl.int64) * x_strides[2] + gl.cast(lo, gl.int64) * x_strides[1]
    row, d = gl.arange(0, BM, gl.SliceLayout(1, A)), gl.arange(0, D, gl.SliceLayout(0, A))
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
