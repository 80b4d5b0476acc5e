"""Compile many kernels at once, in threads of this process, before they are used.

    precompile(launch)      # launch() calls the launchers of the kernels; no kernel runs, all are compiled and loaded
    y, l = compile_and_call(quadratic.forward, kind, q, k, v, p=4)      # the first call of a kind compiles at once

Triton compiles a kernel when it is first launched, one after another, a second or more each. Most of that time is spent
in C++ and in ptxas, without Python's lock, so threads divide it. While `precompile` runs, launches of its own thread
only compile, and Triton's AsyncCompileMode hands the work to a pool. Launches of other threads run as usual.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from threading import Lock

import torch

from .common import INTERPRETED, device_guard

THREADS = 16  # at most: Python's part of a kernel takes 0.06 s, which threads do not divide, and all of it about 0.6 s

_lock = Lock()
_compiled = set()  # kinds of calls


def compile_and_call(function, kind, x, *args, **options):
    """Return function(x, *args, **options), which launches kernels on the GPU of the tensor x.

    x is [B, T, H, D]. The first call of a kind compiles them at once. Kernels that it does not launch are compiled when
    another call does. kind: a hashable object; with x it decides which kernels are launched.
    """
    kind = function, kind, x.shape[1] % 16 == 0, x.shape[-1], x.dtype, x.device
    if kind not in _compiled and may_compile(x.device):
        _compiled.add(kind)
        with device_guard(x.device):
            precompile(partial(function, x, *args, **options))
    return function(x, *args, **options)


def may_compile(device):
    """Return True if kernels are compiled for this device, none are just now, and no CUDA graph is captured."""
    on_gpu = device.type == "cuda" and not INTERPRETED
    return on_gpu and not _lock.locked() and not torch.cuda.is_current_stream_capturing()


def precompile(launch):
    """Compile and load the kernels that launch() launches on the current GPU, and return how many they are.

    launch may compute anything else, on results that no kernel has written. Raises what Triton raises if a kernel
    cannot be compiled or loaded. 0 is returned where this Triton or this machine cannot compile in threads.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    if cores < 2:
        return 0
    try:
        from triton.runtime._async_compile import AsyncCompileMode, active_mode
    except ImportError:
        return 0
    with (
        _lock,
        Loader(min(THREADS, cores), initializer=use_device, initargs=(current_device(),)) as loader,
        only_compile(active_mode),
        AsyncCompileMode(loader) as mode,
        torch.autograd.set_multithreading_enabled(False),  # backward passes are launched from this thread too
    ):
        launch()
        return len(mode.future_kernels)


class Loader(ThreadPoolExecutor):
    """Run Triton's compilations in threads, which also load the kernels onto the GPU."""

    def submit(self, compile_kernel):
        return super().submit(load, compile_kernel)


def load(compile_kernel):
    """Return the kernel that compile_kernel() returns, loaded, and with its launcher, which gcc compiles."""
    kernel = compile_kernel()
    if torch.cuda.is_available():
        kernel.run  # noqa: B018
    return kernel


@contextmanager
def only_compile(active_mode):
    """Let launches compile and not run, in the thread where active_mode, a ContextVar, is set."""
    from triton.runtime.jit import JITFunction

    run = JITFunction.run

    def compile_or_run(self, *args, warmup, **kwargs):
        if active_mode.get() is None:
            return run(self, *args, warmup=warmup, **kwargs)
        request_keys(self)
        return run(self, *args, warmup=True, **kwargs)

    JITFunction.run = compile_or_run
    try:
        yield
    finally:
        JITFunction.run = run
        active_mode.set(None)  # Triton 3.6 leaves it set where a kernel could not be compiled


def request_keys(function):
    """Ask for the key of a kernel in Triton's cache, and before it for the keys of the functions that it calls.

    A key contains the constants of a called function only if that function's key was computed earlier. In this order
    it always does, whatever was launched before, so that another process finds the kernel in the cache.
    """
    if function.hash is not None:
        return
    for name in function.fn.__code__.co_names:
        callee = function.fn.__globals__.get(name)
        if hasattr(callee, "cache_key"):
            request_keys(callee)
    function.cache_key  # noqa: B018


def current_device():
    """Return the number of the current GPU, or None if there is none."""
    return torch.cuda.current_device() if torch.cuda.is_available() else None


def use_device(device):
    """Make a GPU the current one of this thread."""
    if device is not None:
        torch.cuda.set_device(device)
