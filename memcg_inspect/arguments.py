# SPDX-License-Identifier: LGPL-2.1-or-later
"""What the parsers of the command line and of ``%memcg`` in drgn have in common."""

from __future__ import annotations

from argparse import Action, ArgumentError, ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

__all__ = ("CommonOptions", "Parser", "number_between", "number_of_jobs", "period")

#: More processes than any machine has cores.
_MOST_JOBS = 9999
#: A day, in seconds.
_LONGEST_PERIOD = 24 * 60 * 60

#: Begins the names of attributes that hold what each parser was given, by argument.
_GIVEN = "given to "


class _Once(Action):
    """Store a value. A second one would silently replace the first."""

    def __call__(
        self, parser: ArgumentParser, namespace: Namespace, values: Any, option: str | None = None
    ) -> None:
        if option is not None:  # None for positional arguments
            given = _given(parser, namespace)
            if self.dest in given:
                raise _repeated(self)
            given[self.dest] = self
        setattr(namespace, self.dest, values)


class _Each(Action):
    """Add a value to the others."""

    def __call__(
        self, parser: ArgumentParser, namespace: Namespace, values: Any, option: str | None = None
    ) -> None:
        found = _given(parser, namespace).setdefault(self.dest, [])
        found.append(values)
        setattr(namespace, self.dest, found)


def _given(parser: ArgumentParser, namespace: Namespace) -> dict[str, Any]:
    given: dict[str, Any] = vars(namespace).setdefault(_GIVEN + parser.prog, {})
    return given


def _repeated(action: Action) -> ArgumentError:
    return ArgumentError(action, "given more than once, but it takes one value")


class Parser(ArgumentParser):
    """
    A parser that refuses a second value of an option that takes one.

    :ivar example_of: command whose examples are at the end of the help; ``None`` for none
    :ivar commands: what ``add_subparsers()`` returned
    """

    example_of: str | None = None
    commands: Any = None

    def format_help(self) -> str:
        """Return the help, with examples."""
        self.filled()
        text = super().format_help()
        if self.example_of is None:
            return text
        from memcg_inspect.examples import examples

        return f"{text}\n{examples(self.example_of, self.prog.split()[0])}"

    def __init__(
        self, *args: Any, fill: Callable[[Any], None] | None = None, **kwargs: Any
    ) -> None:
        """
        Make a parser.

        :param fill: adds the arguments, when they are needed
        """
        super().__init__(*args, **kwargs)
        self._fill = fill
        for name in (None, "store"):
            self.register("action", name, _Once)
        self.register("action", "append", _Each)

    def filled(self) -> Parser:
        """Return this parser, with its arguments."""
        if self._fill is not None:
            fill, self._fill = self._fill, None
            fill(self)
        return self

    def fill_commands(self) -> None:
        """Add the arguments of all commands, for what looks at them."""
        for parser in self.commands.choices.values():
            parser.filled()

    def add_subparsers(self, **kwargs: Any) -> Any:
        """Add parsers for commands."""
        self.commands = super().add_subparsers(**kwargs)
        return self.commands

    def parse_known_args(self, *args: Any, **kwargs: Any) -> Any:
        """Parse arguments that there are."""
        self.filled()
        return super().parse_known_args(*args, **kwargs)

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Namespace | None = None
    ) -> Namespace:
        """Parse arguments. Options before and after the command are options of both parsers."""
        found = super().parse_args(args, namespace)
        given = [vars(found).pop(name) for name in [*vars(found)] if name.startswith(_GIVEN)]
        together: dict[str, Any] = {}
        for name, value in (pair for of_parser in given for pair in of_parser.items()):
            if name not in together:
                together[name] = value
            elif isinstance(value, list):
                setattr(found, name, together[name] + value)
            else:
                self.error(str(_repeated(value)))
        return found


def number_between(least: int, most: int) -> Callable[[str], int]:
    """Return a parser of whole numbers from *least* to *most*."""

    def parse(text: str) -> int:
        if not (text.isascii() and text.isdigit() and least <= int(text) <= most):
            raise ArgumentTypeError(f"{text!r} is not a number from {least} to {most:,}")
        return int(text)

    return parse


#: Parses the argument of ``--jobs``.
number_of_jobs = number_between(1, _MOST_JOBS)
#: Parses the argument of ``--every``, in seconds.
period = number_between(1, _LONGEST_PERIOD)


class CommonOptions(NamedTuple):
    """
    What adds options to the parser of a command that other commands have, too.

    :ivar image: adds those that name an image
    :ivar types: adds those that say where types are
    """

    image: Callable[[ArgumentParser], None]
    types: Callable[[ArgumentParser], None]
