#!/usr/bin/env bash
# Runs the real clients (Python, JavaScript, Rust) against a built `rialto`, over the network.
#
#   tests/clients/run.sh [python|js|rust] [arguments of pytest, after `python`]
#
# RIALTO_BIN          the binary under test; default: the newest one below target/
# SCRIPTED_AGENT_BIN  the test agent; default: beside the binary
#
# What the clients need is installed once, in exact versions; later runs need no network.
set -euo pipefail
cd "$(dirname "$0")"

newest() { ls -t ../../target/{debug,ci-release,release}/"$1" 2>/dev/null | head -n 1; }

: "${RIALTO_BIN:=$(newest rialto)}"
[ -x "$RIALTO_BIN" ] || { echo "no rialto binary: run cargo build -p rialto" >&2; exit 2; }
RIALTO_BIN=$(realpath "$RIALTO_BIN")
if [ -z "${SCRIPTED_AGENT_BIN:-}" ]; then
    SCRIPTED_AGENT_BIN="$(dirname "$RIALTO_BIN")/scripted_agent"
    [ -x "$SCRIPTED_AGENT_BIN" ] || SCRIPTED_AGENT_BIN=$(newest scripted_agent)
fi
[ -x "$SCRIPTED_AGENT_BIN" ] || { echo "no scripted agent: run cargo build -p rialto-testkit --bins" >&2; exit 2; }
SCRIPTED_AGENT_BIN=$(realpath "$SCRIPTED_AGENT_BIN")
export RIALTO_BIN SCRIPTED_AGENT_BIN

python_suite() {
    local wanted installed=python/.venv/installed
    wanted=$(cat python/requirements.txt; python3 --version)
    if [ "$(cat "$installed" 2>/dev/null)" != "$wanted" ]; then
        rm -rf python/.venv
        python3 -m venv python/.venv
        python/.venv/bin/pip install --quiet --disable-pip-version-check --requirement python/requirements.txt
        printf '%s' "$wanted" > "$installed"
    fi
    (cd python && .venv/bin/python -B -m pytest "$@")
}

js_suite() {
    local wanted installed=js/node_modules/.installed
    wanted=$(cat js/package-lock.json)
    if [ "$(cat "$installed" 2>/dev/null)" != "$wanted" ]; then
        (cd js && npm ci --silent)
        printf '%s' "$wanted" > "$installed"
    fi
    (cd js && node --test)
}

rust_suite() {
    (cd rust && CARGO_TARGET_DIR="$(realpath ../../../target)/clients" cargo test --quiet --locked)
}

case "${1:-all}" in
    python) shift; python_suite "$@" ;;
    js) js_suite ;;
    rust) rust_suite ;;
    all)
        failed=0
        js_suite || failed=1
        rust_suite || failed=1
        python_suite --quiet || failed=1
        exit "$failed"
        ;;
    *) echo "usage: $0 [python|js|rust]" >&2; exit 2 ;;
esac
