# SPDX-License-Identifier: LGPL-2.1-or-later
"""What is known of the sockets of a memcg, besides the sum of what they have charged."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ("SockRemainder", "UnknownSock", "SockUsage")


class SockRemainder(NamedTuple):
    """
    A socket that has not charged whole pages.

    :ivar address: ``struct sock *``
    :ivar protocol: name of its ``struct proto``
    :ivar remainder: bytes above, or below, the nearest whole number of pages
    """

    address: int
    protocol: str
    remainder: int


class UnknownSock(NamedTuple):
    """
    Why the memory that a socket has charged is not known.

    :ivar reason: in words, for the report
    :ivar either_way: whether it may have charged less than was read. Otherwise only more.
    :ivar has_remainder: whether what was read is not whole pages
    """

    reason: str
    either_way: bool
    has_remainder: bool


class SockUsage(NamedTuple):
    """
    The sockets of one memcg whose protocols account memory.

    :ivar total: number of sockets
    :ivar remainders: those that have not charged whole pages
    :ivar unknown: why the memory of others is not known
    """

    total: int
    remainders: tuple[SockRemainder, ...] = ()
    unknown: tuple[UnknownSock, ...] = ()

    def plus(self, other: SockUsage) -> SockUsage:
        """Return the sockets of both."""
        return SockUsage(
            self.total + other.total,
            self.remainders + other.remainders,
            self.unknown + other.unknown,
        )
