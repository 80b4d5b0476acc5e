"""Objects that operators know by a number: torch's operators take tensors and numbers, and torch.compile guards these.

    number = register(ranks)                    # alive as long as somebody else holds the object
    registered(number).scan_states(...)

An operator in which ranks exchange states takes the number of the object that knows these ranks.
"""

import itertools
import weakref

_objects = weakref.WeakValueDictionary()
_numbers = itertools.count()  # not id(), which would be another one in each process: compiled code has it as a constant


def register(x):
    """Return a new number for an object."""
    number = next(_numbers)
    _objects[number] = x
    return number


def registered(number):
    """Return the object that was given this number; KeyError if nothing holds it any more."""
    return _objects[number]
