# SPDX-License-Identifier: LGPL-2.1-or-later
"""For wrong arguments `scripts/lab` prints one line before a guest boots."""

from __future__ import annotations

from pathlib import Path

import pytest
from labkit import cli


def said(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Run a command that must fail; return its message, which has one line."""
    try:
        status = cli.main(words)
    except SystemExit as error:
        status = int(error.code or 0)
    out = capsys.readouterr()
    lines = [line for line in out.err.splitlines() if line.startswith("lab")]
    assert (status, out.out, len(lines)) == (2, "", 1), out.err
    return lines[0]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["kernel", "5.0"], "no kernel '5.0'; there are: 6.1, "),
        (["image", "--kernel", "7.3", "--seed", "1"], "--seed needs --freeze busy or panic"),
        (["image", "--kernel", "7.3", "--run", "none"], "--run: no such file: none"),
        (["image", "--kernel", "7.3", "--module", "none"], "has no Kbuild"),
        (["image", "--kernel", "7.3", "--nodes", "2", "--cpus", "1"], "at least 2 CPUs"),
        (["image", "--kernel", "7.3", "--memory", "1T"], "not a memory size: '1T'"),
        (["live", "--kernel", "7.3"], "no command given"),
        (["live", "--kernel", "7.3", "--timeout", "-1", "--", "true"], "seconds above 0: '-1'"),
        (["up", "--kernel", "7.3", "--workload", "churn", "--freeze", "settled",
          "--state", "none"], "churn never rests"),
        (["down", "none"], "no guest is kept in none"),
        (["exec", "none", __file__], "no guest is kept in none"),
        (["exec", "none", "none"], "none: No such file or directory"),
        (["poke", "none", "out", "a=1"], "none: No such file or directory"),
        (["poke", __file__, "out", "a=1"], "is not a 64-bit ELF image"),
        (["poke", __file__, "out", "a"], "'a' is not WHAT=VALUE"),
    ],
)  # fmt: skip
def test_one_line(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, own_cache: Path,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert message in said(words, capsys)
    assert [path for path in tmp_path.iterdir() if path != own_cache] == []
