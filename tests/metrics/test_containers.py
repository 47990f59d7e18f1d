# SPDX-License-Identifier: LGPL-2.1-or-later
"""Paths as runtimes make them, with systemd's cgroups and without."""

from __future__ import annotations

import pytest

from memcg_inspect.metrics.containers import Place, place_of

ID = "4f1c" * 16
UID = "1f3c2d4e-0a1b-4c3d-8e9f-001122334455"
POD = UID.replace("-", "_")


@pytest.mark.parametrize(
    ("path", "place"),
    [
        ("/", Place()),
        ("/files/web", Place()),
        ("/system.slice/ssh.service", Place("ssh.service")),
        ("/user.slice/user-0.slice/session-1.scope", Place("session-1.scope")),
        ("/system.slice/a.service/payload", Place("a.service")),
        (f"/system.slice/docker-{ID}.scope", Place("system.slice", "docker", ID[:12])),
        (f"/docker/{ID}", Place("", "docker", ID[:12])),
        (f"/docker/{ID}/init.scope", Place("", "docker", ID[:12])),
        (f"/machine.slice/libpod-{ID}.scope", Place("machine.slice", "podman", ID[:12])),
        (f"/machine.slice/libpod-{ID}.scope/container", Place("machine.slice", "podman", ID[:12])),
        (f"/libpod_parent/libpod-{ID}", Place("", "podman", ID[:12])),
        (
            f"/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{POD}.slice"
            f"/cri-containerd-{ID}.scope",
            Place("kubepods-burstable.slice", "containerd", ID[:12], UID),
        ),
        (
            f"/kubepods.slice/kubepods-pod{POD}.slice/crio-{ID}.scope",
            Place("kubepods.slice", "cri-o", ID[:12], UID),
        ),
        (f"/kubepods/besteffort/pod{UID}/{ID}", Place("", "kubernetes", ID[:12], UID)),
        (f"/kubepods/besteffort/pod{UID}", Place("", "kubernetes", "", UID)),
        # Names that only look like it.
        (f"/{ID}", Place()),
        (f"/docker/{ID}0", Place()),
        ("/docker/web", Place()),
        (f"/pod{UID}", Place()),
        ("/.service", Place()),
    ],
)
def test_what_a_path_tells(path: str, place: Place) -> None:
    assert place_of(path) == place
