# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Why memory is missing
---------------------

A dump may lack pages on purpose: makedumpfile leaves out those that nobody is thought to
need.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from drgn import FaultError, ProgramFlags

from memcg_inspect.image.elf import LEFT_OUT, has_holes
from memcg_inspect.image.image import Image
from memcg_inspect.image.lookup import UnknownKernelError, is_failed_lookup
from memcg_inspect.image.progress import STOPPED
from memcg_inspect.model import Coverage, ImageError

__all__ = ("needing_all", "why_faults", "why_missing")

#: How libkdumpfile calls a page that a dump does not have.
_EXCLUDED = "Excluded page"
#: How drgn calls an address that the kernel's page tables do not have.
_UNMAPPED = "address is not mapped"

_MAKEDUMPFILE = (
    "Pages that the kernel uses itself are missing from this dump: makedumpfile left them out. "
    "At dump levels that include 8 (user data), such as 31, the makedumpfile of Debian up to "
    "1.7.8 takes tail pages of compound pages, among them slabs, for user data on Linux 7.1 and "
    "newer, and 1.7.2 does so on 6.12, too. Take the dump at level 23, or with a newer "
    "makedumpfile."
)
_OTHER = (
    "Memory that the kernel uses is missing from this dump: it is truncated, or it was filtered "
    "too far. Take it again, whole."
)


def why_missing(image: Image, coverage: Iterable[Coverage]) -> tuple[str, ...]:
    """Return what a user should know where parts of a dump could not be read."""
    if image.prog.flags & ProgramFlags.IS_LIVE:
        return ()
    reasons = [example.reason for c in coverage for example in c.examples]
    if reasons and has_holes(image.prog):
        reasons.append(LEFT_OUT)
    return why_faults(reasons)


def why_faults(reasons: Iterable[str]) -> tuple[str, ...]:
    """
    Return the same where only messages of faults are at hand.

    :param reasons: what :class:`drgn.FaultError` says
    """
    # What somebody did not wait for is there.
    reasons = [reason for reason in reasons if reason != STOPPED]
    if any(_EXCLUDED in reason or LEFT_OUT in reason for reason in reasons):
        return (_MAKEDUMPFILE,)
    # Guard pages are not mapped on purpose: nothing is missing there.
    return (_OTHER,) if any(_UNMAPPED not in reason for reason in reasons) else ()


@contextmanager
def needing_all() -> Iterator[None]:
    """
    Tell what is raised where nothing can be done without what is missing.

    :raises ImageError: for memory that is not there, and for types and symbols that are not
    """
    try:
        yield
    except FaultError as error:
        raise ImageError(
            "the image lacks memory that nothing can be read without "
            f"({error}). {' '.join(why_faults([str(error)]))}".rstrip()
        ) from error
    except (LookupError, AttributeError) as error:
        if not is_failed_lookup(error):
            raise
        raise UnknownKernelError(error) from error
