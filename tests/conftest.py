"""Lets the tests import the repository's modules from wherever pytest is started."""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
