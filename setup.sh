#!/bin/sh
# Sets up ddptrain in a virtual environment of its own, then does what it is told.
#
#   sh setup.sh          set up only
#   sh setup.sh demo     ... and train the main job on two ranks, on data that needs no download
#   sh setup.sh test     ... and run the tests of what ddptrain promises; further words go to pytest
#   sh setup.sh test-all ... and run all tests but the marked suites; further words go to pytest
#   sh setup.sh docs     ... and build the site into site/
#   sh setup.sh check    ... and run the linters, the formatter and the type checker, and check launch/
#
# VENV names the environment's folder (default .venv), PYTHON the interpreter (default python3.11 or
# python3). Works without Debian's python3-venv: the system's pip then installs into the environment.
set -eu
cd "$(dirname "$0")"
VENV=${VENV:-.venv}
PYTHON=${PYTHON:-$(command -v python3.11 || command -v python3)}
WHAT=${1:-setup}
unset PYTHONDONTWRITEBYTECODE # else each of a thousand processes compiles the package anew
# suites that are asked for by name
MARKED="long and not faults and not soak and not cluster and not browser and not trackers and not shells"

"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "setup.sh: $PYTHON is older than Python 3.11; name another one: PYTHON=... sh setup.sh" >&2
    exit 2
}
case $WHAT in
setup | demo) EXTRA= ;;
test | test-all) EXTRA="[test]" ;;
docs) EXTRA="[docs]" ;;
check) EXTRA="[dev]" ;;
*)
    echo "setup.sh: $WHAT: must be demo, test, test-all, docs, check or nothing" >&2
    exit 2
    ;;
esac

if [ ! -x "$VENV/bin/python" ]; then
    echo "setup.sh: installing PyTorch and the rest into $VENV; this takes some minutes" >&2
    "$PYTHON" -m venv "$VENV" 2>/dev/null || "$PYTHON" -m venv --without-pip --clear "$VENV"
fi
if "$VENV/bin/python" -m pip --version >/dev/null 2>&1; then
    "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check -e ".$EXTRA"
else
    "$PYTHON" -m pip --python "$VENV/bin/python" install --quiet --disable-pip-version-check -e ".$EXTRA"
fi

case $WHAT in
setup)
    echo "Ready. Next: . $VENV/bin/activate && torchrun --standalone --nproc-per-node=2 -m ddptrain recipe=cnn_cifar10 data=shapes train.epochs=6"
    ;;
demo)
    exec "$VENV/bin/torchrun" --standalone --nproc-per-node=2 -m ddptrain recipe=mobilenet_cifar10 data=shapes train.epochs=3 log.every=25
    ;;
test)
    shift
    if [ $# -eq 0 ]; then set -- -n auto --maxprocesses=4 --dist=loadfile -m "promises and not long and not faults"; fi
    exec "$VENV/bin/python" -m pytest "$@"
    ;;
test-all)
    shift
    if [ $# -gt 0 ]; then exec "$VENV/bin/python" -m pytest "$@"; fi
    "$VENV/bin/python" -m pytest -n auto --maxprocesses=8 --dist=loadfile -m "not serial and not $MARKED"
    exec "$VENV/bin/python" -m pytest -m "serial and not $MARKED"
    ;;
docs)
    # no word about the next major version of MkDocs, which pyproject.toml leaves out
    NO_MKDOCS_2_WARNING=1 exec "$VENV/bin/mkdocs" build --strict --quiet
    ;;
check)
    "$VENV/bin/ruff" check .
    "$VENV/bin/ruff" format --check .
    "$VENV/bin/mypy"
    MYPYPATH=benchmarks:benchmarks/startup_work "$VENV/bin/mypy" benchmarks  # scripts import what lies beside them
    "$VENV/bin/shellcheck" setup.sh .ci/run launch/*.sh launch/*.sbatch
    "$VENV/bin/hadolint" launch/Dockerfile
    "$VENV/bin/check-jsonschema" --builtin-schema vendor.github-workflows .github/workflows/*.yml
    "$VENV/bin/check-jsonschema" --builtin-schema vendor.github-issue-forms .github/ISSUE_TEMPLATE/bug.yml .github/ISSUE_TEMPLATE/idea.yml
    "$VENV/bin/zizmor" --offline --quiet .github/workflows
    exec "$VENV/bin/python" -m pytest -q tests/launch/test_manifests.py
    ;;
esac
