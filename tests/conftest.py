"""Lets the tests import the repository's modules from wherever pytest is started, and keeps them on the CPU."""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # equal to the last bit, as several tests ask, is a promise of the CPU alone
