# SPDX-License-Identifier: LGPL-2.1-or-later
"""Views give the same answer with types from BTF and from DWARF."""

from __future__ import annotations

import pytest
from support.guests import KERNELS, Lab
from support.views import VIEWS, ask


@pytest.mark.image
@pytest.mark.newest_kernel
@pytest.mark.parametrize("kernel", KERNELS)
def test_btf_and_dwarf_say_the_same(lab: Lab, kernel: str) -> None:
    image = lab.image(kernel, "4", "mixed")
    for arguments in VIEWS:
        btf, dwarf = (ask(image.program(dwarf), *arguments) for dwarf in (False, True))
        assert [table.rows for table in btf.tables] == [table.rows for table in dwarf.tables]
        # At rest, all stocks may be empty.
        tables = btf.tables[1:] if arguments == ("stock",) else btf.tables
        assert all(table.rows for table in tables)
        assert btf.notes == dwarf.notes
        assert btf.is_whole
        assert dwarf.is_whole
