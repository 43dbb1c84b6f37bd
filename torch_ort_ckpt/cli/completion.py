"""Shell completion: `torch-ort-ckpt completion bash` (zsh, fish) prints a script that `shtab` makes from the parser."""

from __future__ import annotations

import argparse
import difflib
from typing import Any

SHELLS = ("bash", "zsh", "fish")


class CommandParser(argparse.ArgumentParser):
    """A parser that knows which of its arguments are paths, for shells to complete file names."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.paths: list[argparse.Action] = []
        self.options: list[str] = []
        super().__init__(*args, **options)

    def add_argument(self, *args: Any, **options: Any) -> argparse.Action:
        action = super().add_argument(*args, **options)
        self.options += action.option_strings
        return action

    def add_path(self, *names: str, **options: Any) -> None:
        """As `add_argument`, for the path of a file or folder."""
        self.paths.append(self.add_argument(*names, **options))

    def parse_known_args(self, *args: Any, **options: Any) -> Any:
        """Refuses what it does not know itself: the parser above would not know this command's options."""
        found, unknown = super().parse_known_args(*args, **options)
        if unknown:
            near = difflib.get_close_matches(unknown[0].partition("=")[0], self.options, 1)
            self.error(f"unknown {unknown[0]}" + (f" (did you mean {near[0]}?)" if near else ""))
        return found, unknown


def add(subparsers: Any, root: argparse.ArgumentParser) -> None:
    summary = 'Print a completion script: eval "$(torch-ort-ckpt completion bash)" in your shell\'s start-up file.'
    parser: argparse.ArgumentParser = subparsers.add_parser("completion", help="Print a shell completion script.", description=summary)
    parser.add_argument("shell", choices=SHELLS)
    parser.set_defaults(run=lambda options: _run(options.shell, root, subparsers.choices))


def _run(shell: str, root: argparse.ArgumentParser, commands: dict[str, CommandParser]) -> int:
    import shtab  # takes 40 ms to import, which no other command needs

    for parser in commands.values():
        for action in parser.paths:
            action.complete = shtab.FILE  # type: ignore[attr-defined]  # where shtab looks for it
    print(shtab.complete(root, shell))
    return 0
