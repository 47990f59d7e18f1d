# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Audit the running kernel several times, inside a guest.

Tests run this with the number of audits. It prints a line of JSON for each: exit status, report,
and messages. The last line is of one more audit, by an unprivileged user.
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
    """Audit as the command line does; return exit status, report and messages."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = cli.main(["audit", "--json", "--debuginfo", "btf"])
    try:
        report = json.loads(out.getvalue())
    except ValueError:
        report = None
    return {"status": status, "report": report, "said": err.getvalue()}


def main() -> None:
    """Audit as often as the argument says, and once more without privileges."""
    for _ in range(int(sys.argv[1])):
        print(json.dumps(audited()), flush=True)
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    print(json.dumps(audited()), flush=True)


main()
