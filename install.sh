#!/bin/sh
# Installs megaenc from this clone. The Makefile, the container images and everyone without make come here, so that there is one
# way to choose torch and the versions of the rest.
set -eu

usage() {
  cat <<'END'
usage: [VARIABLE=value ...] ./install.sh

Installs the clone that this script lies in, editable: a change of the source needs no new installation. Versions are those
of constraints.txt. Paths are relative to the clone.

  PYTHON       the interpreter, 3.11 or later (default: the first of python3, python3.13, python3.12 and python3.11 that runs
               and is 3.11 to 3.13, the versions that are tested)
  VENV         the virtual environment to install into, made where it is missing (default: .venv). Empty, VENV='', installs
               into PYTHON's own environment, as in an image that brings torch for its accelerator: that torch is kept
  TORCH_INDEX  where torch comes from, such as https://download.pytorch.org/whl/cpu (default: the index that pip is set up with)
  EXTRAS       extras of pyproject.toml, separated by commas (default: dev; EXTRAS='' for none)
END
}

fail() {
  echo "error: $*" >&2
  exit 2
}

case "${1-}" in
  "") ;;
  -h | --help)
    usage
    exit
    ;;
  *) fail "$1 is not known; settings are variables: ./install.sh --help" ;;
esac

cd "$(dirname "$0")"
python=${PYTHON-}
venv=${VENV-.venv}
extras=${EXTRAS-dev}
constraints=constraints.txt

# ---- refuse what cannot work, while a line still says it -------------------------------------------------------------------

if [ -n "$python" ]; then
  :
elif [ -z "$venv" ]; then
  python=python3 # the others lack the torch of the image
elif [ -x "$venv/bin/python" ]; then
  python=$venv/bin/python
else
  for candidate in python3 python3.13 python3.12 python3.11; do
    # Run it: pyenv has a name in PATH for each version, also for those that do not run.
    if "$candidate" -c '
import ensurepip, sys, venv
sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))
' 2>/dev/null; then
      python=$candidate
      break
    fi
  done
  [ -n "$python" ] || fail "none of python3, python3.13, python3.12 and python3.11 is a Python 3.11 to 3.13 with venv;" \
    "\`apt-get install python3-venv\` (Debian 12, Ubuntu 24.04 or later) or \`uv python install 3.12\` gets one"
fi
"$python" -c '' 2>/dev/null || fail "PYTHON=$python does not run"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
  fail "PYTHON=$python is older than 3.11; name another, as in PYTHON=python3.12"
"$python" -c '
import sys, tomllib
known = tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]
unknown = [extra for extra in sys.argv[1].split(",") if extra and extra not in known]
sys.exit("error: EXTRAS: %s is not among %s" % (unknown[0], ", ".join(known)) if unknown else 0)
' "$extras" || exit 2

if [ -n "$venv" ]; then
  into=$venv
  if ! [ -x "$venv/bin/python" ]; then
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
      fail "PYTHON=$python has no venv module; on Debian and Ubuntu: apt-get install python3-venv"
    "$python" -m venv "$venv"
  fi
  python=$venv/bin/python
else
  into=$("$python" -c 'import sys; print(sys.prefix)')
  "$python" -c '
import os, sys, sysconfig
distribution = os.path.exists(os.path.join(sysconfig.get_path("stdlib"), "EXTERNALLY-MANAGED"))
sys.exit(distribution and sys.prefix == sys.base_prefix and "PIP_BREAK_SYSTEM_PACKAGES" not in os.environ)
' || fail "PYTHON=$python belongs to the distribution, which installs into it alone; name a virtual environment, VENV=DIR"
fi
"$python" -m pip --version >/dev/null 2>&1 || fail "$python has no pip"

# ---- install ---------------------------------------------------------------------------------------------------------------

echo "installing into $into (minutes the first time)"
if [ -z "$venv" ]; then
  # What was built for this machine's accelerator stays: torch and triton, and all that bears a local version such as
  # 2.12.0+rocm7.2. No public index could give it back; PyPI's torch in its place is CUDA's.
  constraints=$(mktemp)
  trap 'rm -f "$constraints"' EXIT
  "$python" - >"$constraints" <<'END'
import re
from importlib.metadata import distributions


def plain(name):
    return re.sub(r"[-_.]+", "-", name).lower()


there = {plain(found.metadata["Name"]): found.version for found in distributions() if found.metadata["Name"]}
kept = {name: version for name, version in there.items() if name in ("torch", "triton") or "+" in version}
for name, version in sorted(kept.items()):
    print(f"{name}=={version}")
with open("constraints.txt") as lines:
    print(*(line for line in lines if plain(re.match(r"[\w.-]*", line)[0]) not in kept), sep="", end="")
END
fi

pip_install() {
  "$python" -m pip --quiet --quiet --disable-pip-version-check install --constraint "$constraints" "$@"
}
pip_install ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch
case ",$extras," in
  *,dev,*)
    # The tests want a triton. An accelerator's torch has brought its own, which may be called pytorch-triton-rocm or alike.
    "$python" -c '
import sys
from importlib.metadata import distributions
sys.exit(not any("triton" in (found.metadata["Name"] or "") for found in distributions()))
' || extras=$extras,triton
    ;;
esac
pip_install --editable ".${extras:+[$extras]}"

# A hint where another package would make runs faster; without NVIDIA's driver there is none to ask.
case ",$extras," in
  *,flash,*) ;;
  *)
    if nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | grep -q '^9\.0'; then
      echo "this machine has a Hopper GPU: EXTRAS=${extras:+$extras,}flash ./install.sh adds flash-attn 4 for CUDA 13 (at 1b 8 % more tokens/s under MLM)"
    fi
    ;;
esac
