"""Classes made of a module's own, for it to change to, of which that class does not hear.

One that has an `__init_subclass__`, as a registry of models does, would find ours under the name of its own, and make
split modules from then on; one that wants arguments there would raise.
"""

from __future__ import annotations

import types
from typing import Any


def made_of(kind: Any, body: dict[str, Any]) -> Any:
    """A class of the same name and metaclass.

    Args:
        kind: the module's, its only base that is seen.
        body: what it has of its own.
    """
    about = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__, **body}
    bases = (unheard(first_base(kind)), kind) if hears(kind) else (kind,)
    return types.new_class(kind.__name__, bases, exec_body=lambda space: space.update(about))


def hears(kind: type) -> bool:
    """Whether it, or one of its bases, is told of each class that is made of it."""
    told = next(each for each in kind.__mro__ if "__init_subclass__" in vars(each))
    return told is not object and "_dmp_unheard" not in vars(told)


def unheard(*bases: type) -> Any:
    """What goes before a class in the bases of another, for that to be made without a word.

    Args:
        bases: of what begins as that class does, see `first_base`.
    """
    about = {"__module__": bases[-1].__module__, "__orig_bases__": ()}  # Generic asks what it was made generic by
    made: Any = type(bases[-1].__name__, bases, about)
    made.__init_subclass__ = classmethod(lambda *_, **__: None)
    made._dmp_unheard = True
    return made


def first_base(kind: type) -> type:
    """The base at which there are no attributes yet. A module can change to a class whose bases begin there alone."""
    while kind.__dictoffset__:
        kind = kind.__base__  # type: ignore[assignment]
    return kind
