# SPDX-License-Identifier: LGPL-2.1-or-later
"""Code changes the key of an image; comments do not."""

from pathlib import Path

import pytest
from labkit import fingerprint

PYTHON = '''#!/usr/bin/env python3
"""A docstring
of two lines."""

x = "# no comment"  # a comment
'''
C = 'int x = 1; /* a\n comment */\n// another\nchar *s = "/* no comment */", c = \'"\'; /* "x" */\n'
SHELL = "#!/bin/sh\n# a comment\necho 'a # b'\n\techo c\n"


@pytest.mark.parametrize(
    ("name", "text", "left"),
    [
        ("a.py", PYTHON, 'x = "# no comment"\n'),
        ("a.c", C, 'int x = 1;\nchar *s = "/* no comment */", c = \'"\';\n'),
        ("a.h", C, 'int x = 1;\nchar *s = "/* no comment */", c = \'"\';\n'),
        ("init", SHELL, "#!/bin/sh\necho 'a # b'\n\techo c\n"),
        ("Kbuild", "# kept\nobj-m := a.o", "# kept\nobj-m := a.o"),
    ],
)
def test_comments_are_left_out(name: str, text: str, left: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    assert fingerprint.code(tmp_path / name) == left


def test_docstrings_of_functions_and_classes(tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_text(
        'class A:\n    """Doc."""\n\n    def f(self):\n        """Doc."""\n        pass\n'
    )
    assert fingerprint.code(path) == "class A:\n    def f(self):\n        pass\n"


def test_a_hash_covers_names_and_code(tmp_path: Path) -> None:
    (tmp_path / "a.c").write_text("int x;\n")
    first = fingerprint.code_hash(tmp_path)
    (tmp_path / "a.c").write_text("/* x */\nint x;\n")
    assert fingerprint.code_hash(tmp_path) == first
    (tmp_path / "a.c").write_text("int y;\n")
    assert fingerprint.code_hash(tmp_path) != first
    (tmp_path / "a.c").write_text("int x;\n")
    (tmp_path / "a.c").rename(tmp_path / "b.c")
    assert fingerprint.code_hash(tmp_path) != first
