"""Generated code of edl/wire/edl.proto.

    python -m scripts.generate_protobuf write    make it again, with the pinned compiler
    python -m scripts.generate_protobuf check    fail when it does not belong to edl.proto, or is too new

Generated code refuses a protobuf library older than its compiler, so the compiler is pinned to the oldest release that
pyproject.toml allows, and installed for the occasion. The check compares descriptors, not text: any compiler will do.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tempfile
import venv
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROTO = Path("edl/wire/edl.proto")
GENERATED = Path("edl/wire/edl_pb2.py")
COMPILER = "grpcio-tools==1.75.1"


def compile_into(folder: Path, python: str) -> None:
    """Compile ``PROTO`` to Python code and its stubs in ``folder``."""
    outputs = [f"--python_out={folder}", f"--pyi_out={folder}"]
    command = [python, "-m", "grpc_tools.protoc", f"-I{ROOT / PROTO.parent}", *outputs, PROTO.name]
    subprocess.run(command, cwd=ROOT, check=True)


def write() -> None:
    """Generate next to ``PROTO`` with the pinned compiler, in an environment of its own."""
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        python = f"{folder}/bin/python"
        subprocess.run([python, "-m", "pip", "install", "--quiet", COMPILER], check=True)
        compile_into(ROOT / PROTO.parent, python)


def descriptor(generated: Path) -> bytes:
    """The serialized file descriptor inside generated code, without the name of the file it came from."""
    from google.protobuf.descriptor_pb2 import FileDescriptorProto

    for node in ast.walk(ast.parse(generated.read_text())):
        match node:
            case ast.Call(func=ast.Attribute(attr="AddSerializedFile"), args=[ast.Constant(value=bytes(data))]):
                proto = FileDescriptorProto.FromString(data)
                proto.ClearField("name")
                return proto.SerializeToString(deterministic=True)
    raise SystemExit(f"{generated}: no descriptor in it; is this generated code?")


def numbers(version: str) -> tuple[int, ...]:
    """``"6.31.1"`` as ``(6, 31, 1)``."""
    return tuple(int(part) for part in version.split("."))


def problems() -> list[str]:
    """What is wrong with the generated code; empty when it may stay."""
    if not (ROOT / PROTO).exists():
        return []
    if not (ROOT / GENERATED).exists():
        return [f"{GENERATED} is missing"]
    found = []
    made_by = re.search(r"Protobuf Python Version: ([\d.]+)", (ROOT / GENERATED).read_text())
    allowed = re.search(r'"protobuf>=([\d.]+)', (ROOT / "pyproject.toml").read_text())
    if made_by and allowed and numbers(made_by[1]) > numbers(allowed[1]):
        found.append(f"{GENERATED} needs protobuf {made_by[1]}, pyproject.toml allows {allowed[1]}")
    if find_spec("grpc_tools") is None:
        print(f"no grpcio-tools here: whether {GENERATED} belongs to {PROTO} was not looked at", file=sys.stderr)
        return found
    with tempfile.TemporaryDirectory() as folder:
        compile_into(Path(folder), sys.executable)
        if descriptor(Path(folder) / GENERATED.name) != descriptor(ROOT / GENERATED):
            found.append(f"{GENERATED} does not belong to {PROTO}")
    return found


def main() -> None:
    """Entry point."""
    match sys.argv[1:]:
        case ["write"]:
            write()
        case ["check"]:
            found = problems()
            if found:
                raise SystemExit("\n".join([*found, "Run: python -m scripts.generate_protobuf write"]))
            print("generated code is up to date")
        case _:
            raise SystemExit(__doc__)


if __name__ == "__main__":
    main()
