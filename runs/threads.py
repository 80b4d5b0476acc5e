"""Let the threads of OpenMP sleep while they wait for work. A program imports this before torch.

torch's CPU wheels bring GNU's OpenMP. Its threads spin while they wait: beside another busy program they keep a core
from the thread that they wait for, and a step takes many times longer. OpenMP reads the policy when it is loaded. A
policy in the environment stays, and GOMP_SPINCOUNT or KMP_BLOCKTIME (of LLVM's OpenMP) count more.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
