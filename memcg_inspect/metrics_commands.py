# SPDX-License-Identifier: LGPL-2.1-or-later
"""The command ``metrics``: an audit as figures for Prometheus."""

from __future__ import annotations

import time
from argparse import Namespace
from collections import Counter
from contextlib import suppress

from memcg_inspect import __version__
from memcg_inspect.answers import cancellable
from memcg_inspect.collect import audit
from memcg_inspect.escape import printable
from memcg_inspect.files import write_file
from memcg_inspect.image.image import Image
from memcg_inspect.image.missing import as_image_errors
from memcg_inspect.metrics.exposition import OPENMETRICS, PROMETHEUS, Family, exposition
from memcg_inspect.metrics.families import Unpaid, metrics_of
from memcg_inspect.metrics.serve import served
from memcg_inspect.model import MemcgInspectError
from memcg_inspect.output import check_output, output, say
from memcg_inspect.report import WAIT
from memcg_inspect.running import opened_image, paced
from memcg_inspect.tables import UsageError
from memcg_inspect.views.pages import pages

__all__ = ("metrics",)

_INCOMPLETE = 3
_INTERRUPTED = 130


def metrics(args: Namespace) -> int:
    """Run ``metrics``; return its exit status."""
    check_output()
    if args.listen is not None and args.core:
        raise UsageError("metrics: --listen needs a running kernel: a vmcore does not change")
    if args.listen is not None and args.pause:
        raise UsageError("metrics: --pause would stop the guest all the time")
    with opened_image(args) as image:
        if args.listen is not None:
            with suppress(KeyboardInterrupt):
                _serve(image, args)
            return 0
        with cancellable(image), as_image_errors():
            found, is_whole = _metrics(image, args)
        if image.progress.stop:
            return _INTERRUPTED
    text = exposition(found)
    if args.out is not None:
        write_file(args.out, text)
    else:
        output(lambda: print(text, end="", flush=True))
    return 0 if is_whole else _INCOMPLETE


def _metrics(image: Image, args: Namespace) -> tuple[list[Family], bool]:
    """Return the metrics of an audit, and whether everything could be read."""
    # What is watched all the time need not be waited for.
    report = audit(image, WAIT if args.listen is None else 0.0)
    unpaid = _unpaid(image) if args.pages else None
    found = metrics_of(report, time.time(), __version__, args.depth, args.top, unpaid)
    return found, report.verdict != "incomplete"


def _unpaid(image: Image) -> list[Unpaid]:
    """Return kernel memory by node."""
    zones = next(table for table in pages(image).tables if table.name == "zones")
    paid: Counter[int] = Counter()
    unpaid: Counter[int] = Counter()
    for row in zones.rows:
        paid[row.node] += row.kernel_paid
        unpaid[row.node] += row.kernel_unpaid
    return [Unpaid(node, paid[node], unpaid[node]) for node in sorted(unpaid)]


def _serve(image: Image, args: Namespace) -> None:
    """Audit again and again, and serve the newest figures."""
    with served(*args.listen) as (content, port):
        host = f"[{args.listen.host}]" if ":" in args.listen.host else args.listen.host
        output(lambda: print(f"http://{host}:{port}/metrics", flush=True))
        for _ in paced(args.every):
            try:
                # A new image: nodes, memory and CPUs may have come and gone.
                with as_image_errors():
                    found = _metrics(Image(image.prog), args)[0]
                content.texts = {
                    kind: exposition(found, kind) for kind in (PROMETHEUS, OPENMETRICS)
                }
            except MemcgInspectError as error:
                # The figures of the last audit stay, with their time.
                say(f"memcg-inspect: {printable(str(error))}")
                content.why_not = str(error)
