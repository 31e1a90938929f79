#!/usr/bin/env bash
# Runs the real clients (Python, JavaScript, Rust) against a built `rialto`, over the network.
#
#   tests/clients/run.sh [--cluster] [python|python03|js|js03|rust] [arguments of pytest, after `python` or `python03`]
#
# --cluster           not `rialto dev`, but 2 gateways, 2 task-stores and 3 runners on Redis, behind a balancer
# RIALTO_BIN          the binary under test; default: the newest one below target/
# SCRIPTED_AGENT_BIN  the test agent; default: beside the binary
#
# Without arguments: all suites against `rialto dev`, and then those that say most about a cluster against one.
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

# What of the Python suite is asked of a cluster, too, when everything runs.
IN_CLUSTER=(test_sdk.py test_protocol.py test_streaming.py test_grpc.py)

# The cluster ends with its stdin, so with this script, however that ends.
start_cluster() {
    coproc CLUSTER { exec python3 -B python/cluster.py; }
    read -r RIALTO_TESTS_CLUSTER <&"${CLUSTER[0]}" || { echo "no cluster" >&2; exit 1; }
    export RIALTO_TESTS_CLUSTER
}

stop_cluster() {
    local pid=$CLUSTER_PID
    exec {CLUSTER[1]}>&-
    wait "$pid"
}

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
    if [ -z "${NGINX_BIN:-}" ]; then
        NGINX_BIN=$(../../scripts/test-needs.sh nginx) || return 1
        export NGINX_BIN
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

failed=0
in_cluster=
if [ "${1:-}" = --cluster ]; then
    in_cluster=1
    shift
    start_cluster
fi
case "${1:-all}" in
    python | python03) python_suite "$@" || failed=1 ;;
    js | js03) js_suite "$1" || failed=1 ;;
    rust) rust_suite || failed=1 ;;
    all)
        all_but_python() {
            js_suite js || failed=1
            js_suite js03 || failed=1
            rust_suite || failed=1
            python_suite python03 --quiet || failed=1
        }
        all_but_python
        python_suite python --quiet || failed=1
        if [ -z "$in_cluster" ]; then
            in_cluster=1
            start_cluster
            all_but_python
            python_suite python --quiet "${IN_CLUSTER[@]}" || failed=1
        fi
        ;;
    *) echo "usage: $0 [--cluster] [python|python03|js|js03|rust]" >&2; exit 2 ;;
esac
if [ -n "$in_cluster" ]; then
    stop_cluster || { echo "the cluster did not end well" >&2; failed=1; }
fi
exit "$failed"
