"""Make Triton's interpreter about four times as fast, and right in bfloat16; all other bits are the same as without.

The kernels' tests run thousands of small programs in the interpreter, and most of the time went into preparations that
it repeats for each function call, each tensor and each element of a scan. speed_up replaces those parts. If a version
of Triton lacks one of these parts, that version is left as it is.

The interpreter multiplies bfloat16's bit patterns as integers (triton issue 11584), and it truncates what it converts
to bfloat16. In Triton 3.8 it has no constants in bfloat16.
"""

import dataclasses

import numpy as np


def speed_up():
    """Replace slow functions of Triton's interpreter; call it after TRITON_INTERPRET is set."""
    try:
        from triton.runtime import interpreter
    except ImportError:  # Triton has no wheel for this system
        return
    changes = _patch_once_a_launch, _scan_in_parallel, _remember_dtypes, _assert_nothing_in_vain, _compute_in_bfloat16
    for change in changes:
        try:
            change(interpreter)
        except AttributeError:
            pass


def _patch_once_a_launch(interpreter):
    """Let each module's functions replace the members of triton.language once a launch, not at each of their calls."""
    patch, launch, patched = interpreter._patch_lang, interpreter.GridExecutor.__call__, set()

    def patch_once(fn):
        if fn.__module__ not in patched:
            patched.add(fn.__module__)
            return patch(fn)

    def launch_anew(self, *args, **kwargs):
        patched.clear()  # a launch ends with triton.language as it was before
        return launch(self, *args, **kwargs)

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = patch_once, launch_anew


def _scan_in_parallel(interpreter):
    """Scan in log2(n) steps of whole tensors (Hillis and Steele), not element by element."""
    interpreter.ScanOps.generic_scan  # noqa: B018 (raises AttributeError in a version that has none)

    def scan(self, inputs):
        length, step = inputs[0].handle.data.shape[self.axis], 1
        while step < length:
            shifted = [self.to_tensor(np.roll(x.handle.data, step, self.axis), x.dtype) for x in inputs]
            combined = self.combine_fn.fn(*shifted, *inputs)
            combined = combined if isinstance(combined, tuple) else (combined,)
            shape = [-1 if axis == self.axis else 1 for axis in range(inputs[0].handle.data.ndim)]
            first = (np.arange(length) < step).reshape(shape)  # nothing comes before these
            inputs = [
                self.to_tensor(np.where(first, x.handle.data, y.handle.data), x.dtype)
                for x, y in zip(inputs, combined, strict=True)
            ]
            step *= 2
        return list(inputs)

    interpreter.ScanOps.generic_scan = scan


def _remember_dtypes(interpreter):
    """Look a dtype up instead of building the table of all dtypes for each tensor."""
    find, known = interpreter._get_np_dtype, {}

    def remembered(dtype):
        name = dtype.scalar.name  # a block has its elements' dtype
        if name not in known:
            known[name] = find(dtype)
        return known[name]

    interpreter._get_np_dtype = remembered


def _assert_nothing_in_vain(interpreter):
    """Leave out the check of each sum and product of integers, which looks at `debug` only after all the work."""
    options = interpreter.interpreter_builder.options
    interpreter.interpreter_builder.options = dataclasses.replace(options, sanitize_overflow=options.debug)


def _compute_in_bfloat16(interpreter):
    """Multiply bfloat16 matrices as float32, and round what is converted to bfloat16 to the nearest."""
    builder, tl = interpreter.InterpreterBuilder, interpreter.tl
    dot, cast, convert = builder.create_dot, builder.cast_impl, builder.create_fp_to_fp

    def widen(x):
        if x.dtype.scalar != tl.bfloat16:
            return x
        return interpreter.TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def cast_right(self, x, to, change=cast):
        if x.dtype.scalar == tl.bfloat16:
            return cast(self, widen(x), to) if to.scalar != tl.bfloat16 else x
        if to.scalar != tl.bfloat16:
            return change(self, x, to)
        bits = x.data.astype(np.float32).view(np.uint32)
        rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
        nan = np.isnan(x.data)
        return interpreter.TensorHandle(np.where(nan, 0x7FC0, rounded).astype(np.uint16), tl.bfloat16)

    builder.create_dot = lambda self, a, b, *args: dot(self, widen(a), widen(b), *args)
    builder.cast_impl = cast_right
    builder.get_bf16 = lambda self, value: cast_right(self, self.get_fp32(value), tl.bfloat16)
    builder.create_fp_to_fp = lambda self, x, to, mode: cast_right(self, x, to, lambda *args: convert(*args, mode))
