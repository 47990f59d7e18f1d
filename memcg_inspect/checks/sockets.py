# SPDX-License-Identifier: LGPL-2.1-or-later
"""What is known of the sockets of a memcg, besides the sum of what they have charged."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ("OddSock", "SockDoubt", "SockUsage")


class OddSock(NamedTuple):
    """
    A socket that has not charged whole pages.

    :ivar address: ``struct sock *``
    :ivar protocol: name of its ``struct proto``
    :ivar odd: bytes above, or below, the nearest whole number of pages
    """

    address: int
    protocol: str
    odd: int


class SockDoubt(NamedTuple):
    """
    Why the memory that a socket has charged is not known.

    :ivar reason: in words, for the report
    :ivar either_way: whether it may have charged less than was read. Otherwise only more.
    :ivar odd: whether what was read is not whole pages
    """

    reason: str
    either_way: bool
    odd: bool


class SockUsage(NamedTuple):
    """
    The sockets of one memcg whose protocols account memory.

    :ivar total: number of sockets
    :ivar odd: those that have not charged whole pages
    :ivar doubts: why the memory of others is not known
    """

    total: int
    odd: tuple[OddSock, ...] = ()
    doubts: tuple[SockDoubt, ...] = ()

    def plus(self, other: SockUsage) -> SockUsage:
        """Return the sockets of both."""
        return SockUsage(self.total + other.total, self.odd + other.odd, self.doubts + other.doubts)
