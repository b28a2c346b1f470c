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
  # Again only where what is to be installed has changed: pip looks at it for a quarter of a minute.
  local made stamp="$VENV/installed-$1"
  made="$PWD $(cat pyproject.toml constraints.txt | cksum)"
  [ "$(cat "$stamp" 2>/dev/null)" != "$made" ] || return 0
  echo "installing into $VENV what is needed for '$1': some minutes the first time" >&2
  "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile \
    --constraint constraints.txt --editable ".[$1]"
  # pip would compile one file after the other. What is large and used in part is compiled as it is
  # imported; some files are for a later Python.
  "$VENV/bin/python" -m compileall -qq -j 0 -x '/(sympy|transformers)/' "$VENV"/lib/python*/site-packages || true
  echo "$made" > "$stamp"
}
