#!/usr/bin/env bash
# Runs the real clients (Python, JavaScript, Rust) against a built `rialto`, over the network.
#
#   tests/clients/run.sh [python|python03|js|js03|rust] [arguments of pytest, after `python` or `python03`]
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

# Folders whose name ends in 03 have the last clients of protocol 0.3.
python_suite() {
    local folder=$1 wanted installed=$1/.venv/installed
    shift
    wanted=$(cat "$folder/requirements.txt"; python3 --version)
    if [ "$(cat "$installed" 2>/dev/null)" != "$wanted" ]; then
        rm -rf "$folder/.venv"
        python3 -m venv "$folder/.venv"
        "$folder/.venv/bin/pip" install --quiet --disable-pip-version-check --requirement "$folder/requirements.txt"
        printf '%s' "$wanted" > "$installed"
    fi
    (cd "$folder" && .venv/bin/python -B -m pytest "$@")
}

js_suite() {
    local folder=$1 wanted installed=$1/node_modules/.installed
    wanted=$(cat "$folder/package-lock.json")
    if [ "$(cat "$installed" 2>/dev/null)" != "$wanted" ]; then
        (cd "$folder" && npm ci --silent)
        printf '%s' "$wanted" > "$installed"
    fi
    (cd "$folder" && node --test)
}

rust_suite() {
    (cd rust && CARGO_TARGET_DIR="$(realpath ../../../target)/clients" cargo test --quiet --locked)
}

case "${1:-all}" in
    python | python03) python_suite "$@" ;;
    js | js03) js_suite "$1" ;;
    rust) rust_suite ;;
    all)
        failed=0
        js_suite js || failed=1
        js_suite js03 || failed=1
        rust_suite || failed=1
        python_suite python03 --quiet || failed=1
        python_suite python --quiet || failed=1
        exit "$failed"
        ;;
    *) echo "usage: $0 [python|python03|js|js03|rust]" >&2; exit 2 ;;
esac
