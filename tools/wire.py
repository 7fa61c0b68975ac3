"""The wire schema's tool: `python -m tools.wire generate|lint|drift|breaking ...`. It runs the steps in this order.

- generate writes tidegate/v1 from proto/tidegate/v1: messages, services and their types.
- drift fails when generate would change a committed file.
- lint and breaking are buf's. breaking compares with the commit where this branch left origin/main, or with the last
  commit when there is no such branch. A folder without a repository has nothing to compare with.

No step needs a network.
"""

from __future__ import annotations

import argparse
import io
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
PROTO = ROOT / "proto"
PACKAGE = Path("tidegate/v1")
GENERATED = ("*_pb2.py", "*_pb2.pyi", "*_pb2_grpc.py", "*_pb2_grpc.pyi")


def generated_files(root: Path) -> dict[str, bytes]:
    """Name -> content of every generated file below `root`."""
    folder = root / PACKAGE
    return {path.name: path.read_bytes() for pattern in GENERATED for path in sorted(folder.glob(pattern))}


def compile_into(root: Path) -> None:
    """Runs protoc with the message, service and type plugins. CalledProcessError when a file does not compile.

    protoc writes a file of services for every schema. A schema without services gets an empty one, which is deleted.
    """
    outputs = [f"--{kind}_out={root}" for kind in ("python", "grpc_python", "mypy", "mypy_grpc")]
    plugins = [f"--plugin=protoc-gen-{name}={BIN / f'protoc-gen-{name}'}" for name in ("mypy", "mypy_grpc")]
    sources = [str(path.relative_to(PROTO)) for path in sorted((PROTO / PACKAGE).glob("*.proto"))]
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{PROTO}", *plugins, *outputs, *sources]
    subprocess.run(command, cwd=PROTO, check=True, stderr=subprocess.PIPE, text=True)
    for source in sources:
        if not re.search(r"^service ", (PROTO / source).read_text(), re.MULTILINE):
            for suffix in ("py", "pyi"):
                (root / PACKAGE / f"{Path(source).stem}_pb2_grpc.{suffix}").unlink(missing_ok=True)


def generate() -> str | None:
    for name in generated_files(ROOT):
        (ROOT / PACKAGE / name).unlink()
    compile_into(ROOT)
    print(f"{PACKAGE}: {len(generated_files(ROOT))} files generated")
    return None


def drift() -> str | None:
    with tempfile.TemporaryDirectory() as folder:
        compile_into(Path(folder))
        want, got = generated_files(Path(folder)), generated_files(ROOT)
    stale = sorted(name for name in want.keys() | got.keys() if want.get(name) != got.get(name))
    if stale:
        return f"{len(stale)} generated files differ from proto/: {', '.join(stale)}; run make proto and commit them"
    return None


def lint() -> str | None:
    found = subprocess.run([BIN / "buf", "lint"], cwd=ROOT, check=False, capture_output=True, text=True)
    return f"buf lint:\n{found.stdout}{found.stderr}" if found.returncode else None


def git(*arguments: str) -> bytes | None:
    """Git's output. None when git refuses (no repository, no such commit, no such path)."""
    answer = subprocess.run(["git", *arguments], cwd=ROOT, check=False, capture_output=True)
    return answer.stdout if answer.returncode == 0 else None


def baseline() -> bytes | None:
    """A tar of the schema that this one must not break. None when there is none yet."""
    fork = git("merge-base", "HEAD", "origin/main") or git("rev-parse", "HEAD")
    if fork is None:
        return None
    return git("archive", "--format=tar", fork.decode().strip(), "buf.yaml", "proto")


def breaking() -> str | None:
    before = baseline()
    if before is None:
        print("buf breaking: no earlier schema to compare with")
        return None
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(before)) as schema:
            schema.extractall(folder, filter="data")
        command = [str(BIN / "buf"), "breaking", "--against", folder]
        found = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    if found.returncode:
        return f"buf breaking: add fields and messages instead of changing them:\n{found.stdout}{found.stderr}"
    return None


STEPS: dict[str, Callable[[], str | None]] = {
    "generate": generate,
    "lint": lint,
    "drift": drift,
    "breaking": breaking,
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.wire")
    parser.add_argument("steps", nargs="+", choices=list(STEPS))
    for name in parser.parse_args().steps:
        try:
            problem = STEPS[name]()
        except subprocess.CalledProcessError as failed:
            problem = f"protoc refused proto/: {failed.stderr}"
        if problem is not None:
            print(problem, file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
