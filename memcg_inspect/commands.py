# SPDX-License-Identifier: LGPL-2.1-or-later
"""
drgn commands
-------------

drgn loads this module through its plugin entry point, so every session has ``%memcg``. The rest of
the package is imported when the command runs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from drgn import Program
from drgn.commands import CommandArgumentError, CommandError, parse_shell_command
from drgn.commands.linux import linux_kernel_custom_command

__all__ = ()


@linux_kernel_custom_command(  # type: ignore[untyped-decorator]
    description="audit and inspect the kernel memory of memory cgroups",
    usage="**memcg** *COMMAND* [*ARGUMENT* ...]",
    long_description="The commands are those of the program memcg-inspect. %memcg --help lists "
    "the commands, and %memcg COMMAND --help shows the options of a command.",
    parse=parse_shell_command,
)
def _cmd_memcg(prog: Program, name: str, args: Sequence[str], **kwargs: Any) -> Any:
    from memcg_inspect.answers import answer, check_arguments, show
    from memcg_inspect.arguments import Parser
    from memcg_inspect.bug import BUG, traceback_lines
    from memcg_inspect.escape import printable
    from memcg_inspect.model import MemcgInspectError
    from memcg_inspect.render.typed import Typed
    from memcg_inspect.session import in_session, session_image
    from memcg_inspect.subcommands import add_subcommands, command_list

    class SessionParser(Parser):
        """A parser that does not exit the session on wrong arguments."""

        def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
            raise CommandArgumentError(*([message.rstrip()] if message else []))

    if not args:
        _print(lambda: print(command_list(f"%{name}"), end="", flush=True))
        return None
    parser = SessionParser(prog=f"%{name}")
    add_subcommands(parser)
    parsed = parser.parse_args(args)
    try:
        check_arguments(parsed)
        result = in_session(answer(session_image(prog), parsed))
        _print(lambda: show(result, parsed, Typed(f"%{name}")))
    except CommandError:
        raise
    except MemcgInspectError as error:
        raise CommandError(printable(str(error))) from None
    except Exception as error:
        # Of other exceptions, a session prints the message alone, such as the key of a KeyError.
        print(traceback_lines(error), end="", file=sys.stderr)
        raise CommandError(BUG) from error
    return result


def _print(show: Callable[[], None]) -> None:
    try:
        show()
    except BrokenPipeError:
        pass  # the reader of the pipe, such as head, has closed it; return the result nevertheless
    except OSError as error:
        raise CommandError(f"output cannot be written: {error.strerror}") from None
