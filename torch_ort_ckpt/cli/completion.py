"""Shell completion: `torch-ort-ckpt completion bash` (or zsh) prints a script made from the parser itself."""

from __future__ import annotations

import argparse
from typing import Any

_SCRIPT = """\
{zsh}_torch_ort_ckpt() {{
    local current="${{COMP_WORDS[COMP_CWORD]}}" words
    if [ "$COMP_CWORD" -eq 1 ]; then
        words="{commands}"
    else
        case "${{COMP_WORDS[1]}}" in
{cases}
        esac
    fi
    COMPREPLY=($(compgen -W "$words" -- "$current"))
    case "$COMP_CWORD:$current" in
        1:* | *:-*) ;;
        *) COMPREPLY=($(compgen -f -- "$current")) ;;
    esac
}}
complete -o filenames -F _torch_ort_ckpt torch-ort-ckpt
"""


def add(subparsers: Any) -> None:
    summary = 'Print a completion script: eval "$(torch-ort-ckpt completion bash)" in your shell\'s start-up file.'
    parser: argparse.ArgumentParser = subparsers.add_parser("completion", help="Print a shell completion script.", description=summary)
    parser.add_argument("shell", choices=("bash", "zsh"))
    parser.set_defaults(run=lambda options: _run(options, subparsers.choices))


def script(shell: str, commands: dict[str, argparse.ArgumentParser]) -> str:
    """The script for one shell; zsh runs bash's through its own emulation."""
    cases = "\n".join(
        f'            {name}) words="{" ".join(sorted(parser._option_string_actions))}" ;;' for name, parser in sorted(commands.items())
    )
    zsh = "autoload -U +X bashcompinit && bashcompinit\n" if shell == "zsh" else ""
    return _SCRIPT.format(zsh=zsh, commands=" ".join(sorted(commands)), cases=cases)


def _run(options: argparse.Namespace, commands: dict[str, argparse.ArgumentParser]) -> int:
    print(script(options.shell, commands), end="")
    return 0
