# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Audits of the running kernel, one after the other, inside a guest.

Run by the tests with the number of audits; prints a line of JSON for each: the exit status, and
the report, or what was said in place of one. The last line is of one that nobody in particular
tried to make.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys

from memcg_inspect import cli

NOBODY = 65534


def audited() -> dict[str, object]:
    """One audit, as the command line does it."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = cli.main(["audit", "--json", "--debuginfo", "btf"])
    try:
        report = json.loads(out.getvalue())
    except ValueError:
        report = None
    return {"status": status, "report": report, "said": err.getvalue()}


def main() -> None:
    """Audit as often as asked for."""
    for _ in range(int(sys.argv[1])):
        print(json.dumps(audited()), flush=True)
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    print(json.dumps(audited()), flush=True)


main()
