#!/usr/bin/env bash
# Finds the programs that some tests need, or installs them, and prints their paths, one a line.
#
#   scripts/test-needs.sh redis-server postgres
#
# Looks in PATH and where Debian puts things, then installs with apt as root or with `sudo -n`. When neither helps,
# one line says what is missing, and the exit code is 1.
set -euo pipefail

find_program() {
    local path
    if path=$(command -v "$1" 2>/dev/null); then
        printf '%s\n' "$path"
        return
    fi
    # Debian keeps the servers of PostgreSQL out of PATH; the newest version comes last.
    path=$(printf '%s\n' /usr/sbin/"$1" /usr/local/sbin/"$1" /usr/lib/postgresql/*/bin/"$1" | while read -r candidate; do
        if [ -x "$candidate" ]; then printf '%s\n' "$candidate"; fi
    done | sort -V | tail -n 1)
    [ -n "$path" ] && printf '%s\n' "$path"
}

package_of() {
    case "$1" in
        redis-server) echo redis-server ;;
        postgres) echo postgresql ;;
        nginx) echo nginx ;;
        *) return 1 ;;
    esac
}

install_package() {
    local as_root=()
    command -v apt-get >/dev/null 2>&1 || return 1
    if [ "$(id -u)" -ne 0 ]; then
        sudo -n true 2>/dev/null || return 1
        as_root=(sudo -n)
    fi
    {
        "${as_root[@]}" apt-get update -qq
        # Only the program: no service is to be started on this machine.
        "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 apt-get install -y -qq --no-install-recommends "$1"
    } >&2
}

[ "$#" -gt 0 ] || { echo "usage: $0 PROGRAM..." >&2; exit 2; }
for program in "$@"; do
    package=$(package_of "$program") || { echo "$0: knows no package for $program" >&2; exit 2; }
    find_program "$program" && continue
    install_package "$package" || true
    find_program "$program" && continue
    echo "tests need $program: install the package $package" >&2
    exit 1
done
