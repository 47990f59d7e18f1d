# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Types and symbols that a kernel does not have
---------------------------------------------

drgn raises :class:`LookupError` for a type, a member or a symbol that it cannot find,
:class:`drgn.ObjectNotFoundError` for a variable, and :class:`AttributeError` for a member that is
written as an attribute. A bug in this package may raise subclasses of the same classes. This module
distinguishes the two, so that a bug is never reported as an unsupported kernel.
"""

from __future__ import annotations

from drgn import ObjectNotFoundError

from memcg_inspect.model import ImageError

__all__ = ("UnknownKernelError", "is_failed_lookup")


class UnknownKernelError(ImageError):
    """The image has no type, member, variable or symbol of a name that is needed."""

    def __init__(self, reason: object) -> None:
        super().__init__(str(reason))

    def __str__(self) -> str:
        # Not in the arguments: another process makes the error again from these.
        reason = super().__str__()
        return f"this kernel is not supported, or its debug info is incomplete: {reason}"


def is_failed_lookup(error: BaseException) -> bool:
    """
    Return whether drgn raised an error because it could not find a name.

    Nothing in this package raises a plain ``LookupError``, and Python's own ``KeyError`` and
    ``IndexError`` are subclasses.
    """
    if isinstance(error, AttributeError):
        # drgn: "'struct page' has no member 'x'"; Python: "'Page' object has no attribute 'x'"
        return "' has no member '" in str(error)
    return type(error) is LookupError or isinstance(error, ObjectNotFoundError)
