"""The completion of the `tidegate` command for bash and zsh, made of the parser: commands, flags, choices, the names of
jobs and of clusters. The jobs are those of the folder that the line means so far.

source <(tidegate completion)        zsh: autoload -U bashcompinit && bashcompinit first
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping

_FRAME = """\
_tidegate() {
    local words here=${COMP_WORDS[COMP_CWORD]} command=${COMP_WORDS[1]} before=${COMP_WORDS[COMP_CWORD-1]}
    local at jobs=./jobs cluster=$TIDEGATE_CLUSTER contexts=${XDG_CONFIG_HOME:-$HOME/.config}/tidegate/contexts
    for ((at = 1; at < COMP_CWORD; at++)); do
        case "${COMP_WORDS[at]}" in
            --output-dir) jobs=${COMP_WORDS[at+1]} cluster= ;;
            --cluster) cluster=${COMP_WORDS[at+1]} ;;
        esac
    done
    if [ -n "$cluster" ]; then
        jobs=$(sed -n "s/^output_dir: //p" "$contexts/$cluster.yaml" 2>/dev/null)
    fi
    if [ "$COMP_CWORD" -eq 1 ]; then
        words='%s'
    else
        case "$command $before" in
%s
        esac
    fi
    COMPREPLY=($(compgen -W "$words" -- "$here"))
}
complete -o default -F _tidegate tidegate
"""
_JOBS = '$([ -n "$jobs" ] && cd "$jobs" 2>/dev/null && compgen -d | sed -n \'/^[a-z0-9][a-z0-9-]*$/p\')'
"""`compgen -W` runs a `$(command)` in a word: a folder's name must have none."""
_CONTEXTS = "$(cd \"$contexts\" 2>/dev/null && compgen -f | sed -n 's/^\\([a-z0-9][a-z0-9-]*\\)\\.yaml$/\\1/p')"


def bash_script(parser: argparse.ArgumentParser, commands: Mapping[str, argparse.ArgumentParser]) -> str:
    """`commands` are the parsers of the subcommands."""
    first = " ".join([*commands, *_flags(parser)])
    cases = [case for name, command in commands.items() for case in _cases(name, command)]
    return _FRAME % (first, "\n".join(f"            {pattern}) words={words} ;;" for pattern, words in cases))


def _cases(name: str, command: argparse.ArgumentParser) -> Iterator[tuple[str, str]]:
    """Patterns of `<command> <word before>`. The values of flags stand first, because bash takes the first match."""
    words = _flags(command)
    takes_jobs = False
    if name == "context":
        yield "'context remove'", f'"{_CONTEXTS}"'
    for action in command._actions:
        choices = [str(choice) for choice in action.choices or ()]
        patterns = "|".join(f"'{name} {flag}'" for flag in action.option_strings)
        if "--cluster" in action.option_strings:
            yield patterns, f'"{_CONTEXTS}"'
        elif action.option_strings and choices:
            yield patterns, f"'{' '.join(choices)}'"
        elif not action.option_strings:
            words += choices
            takes_jobs = takes_jobs or action.dest in ("job", "jobs")
    yield f"'{name} '*", f"'{' '.join(words)}'" + (f'" {_JOBS}"' if takes_jobs else "")


def _flags(parser: argparse.ArgumentParser) -> list[str]:
    return [flag for action in parser._actions for flag in action.option_strings]
