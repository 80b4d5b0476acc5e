"""Compile kernels in several processes before they are used, which then finds them in Triton's cache.

    precompile(function, arguments, device)     # in the process that will call function(*arguments) on this GPU

Triton compiles a kernel when it is first launched, one after the other, a second or more each: half a minute for one
size of the chunked form. So a few processes are started, which take a CPU for this GPU, call the function without
launching anything, and compile every n-th kernel that it would have launched. The rest is compiled later, as ever.
"""

import os
import pickle
import subprocess
import sys
import time
from importlib import import_module

import torch

from . import configs

CORES = 4  # with fewer, starting the processes takes as long as they save
PROCESSES = 8  # at most
LIMIT = 300.0  # seconds until they are ended


def precompile(function, arguments, device):
    """Compile the kernels that function(*arguments) launches on a GPU; return how many processes did.

    function: of a module that can be imported, it must make its tensors on a device "cpu" itself, and may compute
    anything; device: a torch.device. Nothing is raised if it does not work.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    if torch.version.hip or cores < CORES:
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    what = function.__module__, function.__name__, arguments, 10 * major + minor, tuple(configs.gpu(device))
    parts = min(PROCESSES, cores // 2)
    env = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(os.path.abspath(p) for p in sys.path)}
    # the parts see no GPU, and one thread each is enough for what they compute
    env |= {"OMP_NUM_THREADS": "1"}
    nowhere, processes, until = subprocess.DEVNULL, [], time.monotonic() + LIMIT
    try:
        for part in range(parts):
            command = [sys.executable, "-m", __name__, pickle.dumps((*what, part, parts)).hex()]
            processes.append(subprocess.Popen(command, env=env, stdin=nowhere, stdout=nowhere, stderr=nowhere))
        for process in processes:
            process.wait(max(0.0, until - time.monotonic()))
    except (OSError, subprocess.TimeoutExpired):
        pass
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return len(processes)


def pretend_gpu(arch, device=0):
    """Make this process compile for a GPU of this compute capability (90) or AMD architecture ("gfx942"), which need
    not be there.

    device: what Triton takes for the number of the GPU; it keeps what it compiled for one number apart from the others.
    Triton's interpreter must be off, and nothing may be launched.
    """
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    target = GPUTarget("hip", arch, 64) if isinstance(arch, str) else GPUTarget("cuda", arch, 32)
    answers = {"get_current_target": target, "get_current_device": device}

    class Pretended:
        def __getattr__(self, name):
            return lambda *_: answers.get(name, 0)

    driver.set_active(Pretended())


def compile_part(module, name, arguments, arch, gpu, part, parts):
    """Call a function of a module, compile every parts-th launch from number `part` on, and launch nothing."""
    from triton.runtime.jit import JITFunction

    pretend_gpu(arch)
    configs.gpu = lambda device: configs.Gpu(*gpu)
    run, launches = JITFunction.run, 0

    def only_compile(self, *args, grid, warmup, **kwargs):
        nonlocal launches
        launches += 1
        # Triton's key of a kernel has the constants of a function it calls only if that one's key was asked for before,
        # by a kernel that was launched earlier: so they are all asked for, in the order of the launches
        self.cache_key  # noqa: B018
        if launches % parts == part:
            run(self, *args, grid=(1,), warmup=True, **kwargs)

    JITFunction.run = only_compile
    getattr(import_module(module), name)(*arguments)


if __name__ == "__main__":
    compile_part(*pickle.loads(bytes.fromhex(sys.argv[1])))
