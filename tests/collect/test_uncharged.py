# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Objects that no memcg pays for, of caches that always account.

A task in the root memcg lets the module ``fixtures/modules/charge`` make objects of its own cache,
which has ``SLAB_ACCOUNT``. Nothing else makes objects of this cache.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from support.charge_module import MODULE, NO_KFENCE, call_sites
from support.guests import BUILT_KERNELS, GuestImage, Lab

pytestmark = pytest.mark.image

OF_ROOT, OF_MEMCG = 13, 7

SCRIPT = f"""set -e
echo 'cache 0 0 {OF_ROOT}' >/sys/kernel/debug/charge/make
cd /sys/fs/cgroup
echo +memory >cgroup.subtree_control
mkdir some
sh -c 'exec 7>/sys/kernel/debug/charge/make 8>some/cgroup.procs
echo 0 >&8
echo "cache 0 0 {OF_MEMCG}" >&7'
"""


def guest(lab: Lab, kernel: str, append: str, folder: Path) -> GuestImage:
    path = folder / "make"
    path.write_text(SCRIPT)
    append = f"{NO_KFENCE} {append}".strip()
    return lab.image(kernel, "1", "idle", modules=(MODULE,), run=str(path), append=append)


@pytest.mark.parametrize("kernel", BUILT_KERNELS)
@pytest.mark.parametrize("append", ["", "sysctl.vm.mem_profiling=1"])
def test_objects_of_the_root_memcg(lab: Lab, kernel: str, append: str, tmp_path: Path) -> None:
    report = guest(lab, kernel, append, tmp_path).report()
    assert report.verdict == "exact"
    [cache] = (cache for cache in report.uncharged if cache.cache == "charge_test")
    [usage] = (usage for usage in report.slab_usage if usage.cache == "charge_test")
    assert (usage.accounts, usage.charged) == (True, OF_MEMCG)
    assert OF_ROOT <= (cache.objects or 0) <= usage.objects - OF_MEMCG
    assert cache.bytes == (cache.objects or 0) * usage.size
    if not append:
        assert cache.sites is None
        return
    assert cache.sites is not None
    [site] = cache.sites
    assert (site.site.split("/")[-1].split()[0], site.objects) == (call_sites()["cache"], OF_ROOT)


@pytest.mark.parametrize("kernel", BUILT_KERNELS)
def test_caches_that_always_account(lab: Lab, kernel: str, tmp_path: Path) -> None:
    """The kernel says which: ``/sys/kernel/slab`` needs a debug option, so they are named here."""
    report = guest(lab, kernel, "", tmp_path).report()
    accounts = {usage.cache for usage in report.slab_usage if usage.accounts}
    assert {"charge_test", "task_struct", "signal_cache", "filp", "kmalloc-cg-512"} <= accounts
    others = {usage.cache for usage in report.slab_usage} - accounts
    assert {"kmalloc-512", "kmem_cache", "kmem_cache_node", "skbuff_head_cache"} <= others
