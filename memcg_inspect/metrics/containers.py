# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Names of containers and units
-----------------------------

What made a cgroup gives it a name that tells the unit of systemd, or the runtime and the ID of a
container, with systemd's cgroups or without: Docker, containerd and CRI-O (Kubernetes), Podman.
"""

from __future__ import annotations

import re
from typing import NamedTuple

__all__ = ("Place", "place_of")

#: Length of the IDs that tools show.
_SHORT = 12
_ID = r"(?P<id>[0-9a-f]{64})"
#: The last part of the path of a container.
_SCOPES = (
    ("docker", re.compile(rf"docker-{_ID}\.scope")),
    ("containerd", re.compile(rf"cri-containerd-{_ID}\.scope")),
    ("cri-o", re.compile(rf"crio-{_ID}\.scope")),
    ("podman", re.compile(rf"libpod-{_ID}(?:\.scope)?")),
)
#: With cgroupfs: the directory above that of a container.
_FOLDERS = {"docker": "docker", "libpod_parent": "podman"}
_BARE = re.compile(_ID)
#: systemd writes "-" in the UID of a pod as "_".
_POD = re.compile(r"pod(?P<uid>[0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12})(?:\.slice)?")
_UNIT = re.compile(r".+\.(?:service|scope|slice|socket|mount|swap)")


class Place(NamedTuple):
    """
    What a path tells of its memcg. What it does not tell is empty.

    :ivar unit: unit of systemd
    :ivar runtime: ``docker``, ``containerd``, ``cri-o``, ``podman``, or ``kubernetes`` for one of
        these that the path does not tell
    :ivar container: first digits of the ID of a container
    :ivar pod: UID of a pod of Kubernetes
    """

    unit: str = ""
    runtime: str = ""
    container: str = ""
    pod: str = ""


def place_of(path: str) -> Place:
    """Return what a path tells. A memcg below that of a container belongs to it."""
    unit = runtime = container = pod = ""
    above = ""
    for part in path.split("/"):
        found = _POD.search(part)
        if found and "kubepods" in path:
            pod, runtime = found["uid"].replace("_", "-"), "kubernetes"
        for name, pattern in _SCOPES:
            match = pattern.fullmatch(part)
            if match:
                runtime, container = name, match["id"][:_SHORT]
        bare = _BARE.fullmatch(part)
        if bare and not container and (above in _FOLDERS or pod):
            runtime, container = _FOLDERS.get(above, runtime), bare["id"][:_SHORT]
        if _UNIT.fullmatch(part) and not container and not pod:
            unit = part
        above = part
    return Place(unit, runtime, container, pod)
