# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Missing memory
--------------

Explains to users why memory is missing from a dump, and translates errors of drgn. makedumpfile
leaves out pages that an analysis usually does not need, and sometimes pages that it needs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from drgn import FaultError, ProgramFlags

from memcg_inspect.image.elf import LEFT_OUT, UNMAPPED, has_holes
from memcg_inspect.image.image import Image
from memcg_inspect.image.lookup import UnknownKernelError, is_failed_lookup
from memcg_inspect.image.progress import STOPPED
from memcg_inspect.model import Coverage, ImageError

__all__ = ("as_image_errors", "refusal", "why_faults", "why_missing")

#: Message of libkdumpfile for a page that a dump does not have.
_EXCLUDED = "Excluded page"

_MAKEDUMPFILE = (
    "Pages of the kernel are missing from this dump: makedumpfile left them out. At dump levels "
    "that include 8 (user data), such as 31, Debian's makedumpfile up to 1.7.8 takes tail pages "
    "of compound pages, such as slabs, for user data on Linux 7.1 and newer; 1.7.2 does so on "
    "6.12, too. Dump at level 23, or with a newer makedumpfile."
)
_OTHER = (
    "Memory of the kernel is missing from this dump: the dump is truncated, or too many pages were "
    "filtered. Make a complete dump."
)


def why_missing(image: Image, coverage: Iterable[Coverage]) -> tuple[str, ...]:
    """Return notes for the user on why parts of a dump could not be read."""
    if image.prog.flags & ProgramFlags.IS_LIVE:
        return ()
    reasons = [example.reason for c in coverage for example in c.examples]
    if reasons and has_holes(image.prog):
        reasons.append(LEFT_OUT)
    return why_faults(reasons)


def why_faults(reasons: Iterable[str]) -> tuple[str, ...]:
    """
    Return the notes that :func:`why_missing` returns, from messages of faults.

    :param reasons: messages of :class:`drgn.FaultError`
    """
    # Memory that was not read because the user cancelled the walk is not missing.
    reasons = [reason for reason in reasons if reason != STOPPED]
    if any(_EXCLUDED in reason or LEFT_OUT in reason for reason in reasons):
        return (_MAKEDUMPFILE,)
    # The kernel does not map guard pages: they are not missing.
    return (_OTHER,) if any(UNMAPPED not in reason for reason in reasons) else ()


def refusal(what: str, error: FaultError) -> ImageError:
    """
    Return the error for memory without which nothing can be read.

    :param what: what is not known for lack of it
    """
    why = " ".join(why_faults([str(error)]))
    return ImageError(f"{what} ({error}). {why}".rstrip())


@contextmanager
def as_image_errors() -> Iterator[None]:
    """
    Translate errors of drgn to errors that are shown to the user in one line.

    Errors of this package, such as a :class:`KeyError`, are not translated.

    :raises ImageError: in place of :class:`drgn.FaultError`, and of :class:`OSError`, which drgn
        raises if the file of the image cannot be read, e.g. because its disk fails
    :raises UnknownKernelError: in place of what drgn raises for a type, member, variable or symbol
        that it cannot find
    """
    try:
        yield
    except FaultError as error:
        raise refusal("the image lacks memory that is needed to read anything", error) from error
    except OSError as error:
        raise ImageError(f"the image cannot be read: {error.strerror or error}") from error
    except (LookupError, AttributeError) as error:
        if not is_failed_lookup(error):
            raise
        raise UnknownKernelError(error) from error
