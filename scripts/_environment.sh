# Sourced by the other scripts: a virtual environment in .venv with this checkout installed.
# PYTHON chooses the interpreter, VENV the place. Repeated calls cost a second.
cd "$(dirname "${BASH_SOURCE[0]}")/.."
VENV="${VENV:-.venv}"
PYTHON="${PYTHON:-python3}"
if ! "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
  echo "ncclops needs Python 3.11 or newer; $PYTHON is $("$PYTHON" --version 2>&1): set PYTHON" >&2
  exit 2
fi
[ -x "$VENV/bin/python" ] || "$PYTHON" -m venv "$VENV"

install() { # install EXTRAS: this checkout, editable, with the torch that the constraints name
  "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check \
    --constraint constraints.txt --editable ".[$1]"
}
