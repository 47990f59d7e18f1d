# SPDX-License-Identifier: LGPL-2.1-or-later
"""Whether a machine runs while it is read."""

from __future__ import annotations

from drgn import FaultError

from memcg_inspect.image.image import Image
from memcg_inspect.linux.kernel.time.jiffies import is_idle, read_jiffies
from memcg_inspect.model import ImageError

__all__ = ("STANDS_STILL", "Ticks")

STANDS_STILL = (
    "the guest did not run while it was read: several samples of it prove no more than one. "
    "Read it with --pause"
)


class Ticks:
    """
    The ticks of a running kernel.

    A guest that somebody has stopped, or whose CPUs get no time, is the same in each sample. So is
    what its CPUs have left half done.

    :ivar have_come: whether it ran, or had nothing to do, at any time that was asked for
    """

    def __init__(self, image: Image) -> None:
        self._image, self.have_come = image, False
        self._last = self._read()

    def come(self) -> bool:
        """Return whether the machine ran since the last call, or had nothing to do."""
        before, self._last = self._last, self._read()
        ran = self._last is None or self._last != before or self._is_idle()
        self.have_come = self.have_come or ran
        return ran

    def _read(self) -> int | None:
        try:
            return read_jiffies(self._image)
        except (FaultError, ImageError):
            return None

    def _is_idle(self) -> bool:
        try:
            return is_idle(self._image)
        except (FaultError, ImageError):
            return False
