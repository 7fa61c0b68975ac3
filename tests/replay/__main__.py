"""Records the histories anew: `python -m tests.replay`. Look at what changed: commands that differ are another decision
on the same history."""

from __future__ import annotations

from tests.replay.recorded import HISTORIES, lines_of, recorded

if __name__ == "__main__":
    for name, path in HISTORIES.items():
        lines = lines_of(recorded(name))
        path.write_text("".join(line + "\n" for line in lines))
        print(f"{path.name}: {len(lines)} lines")
