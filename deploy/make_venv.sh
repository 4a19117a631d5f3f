#!/bin/sh
# Usage: make_venv.sh VENV [PYTHON]
# Creates the virtual environment VENV with PYTHON, or with the newest Python here for which there is
# a wheel of the pinned PyTorch, or with one that uv fetches. An environment that fits stays.
set -eu
venv=$1 wanted=${2-} skipped=
torch=$(sed -n 's/^torch==//p' "$(dirname "$0")/../constraints.txt")
describe='import sys; print("%d.%d.%d" % sys.version_info[:3], sys.base_prefix)'

skip() {
    skipped="$skipped; $1"
    return 1
}

# pip lists the versions that have a wheel for its Python and this machine.
has_torch() {
    "$venv/bin/python" -m pip --retries 1 index versions torch --only-binary :all: 2>/dev/null |
        sed -n 's/^Available versions: //p' | tr -d ' ' | tr ',' '\n' | sed 's/+.*//' |
        grep -qxF "$torch"
}

create() {
    # Not `command -v`: pyenv has shims of versions that cannot be run.
    found=$("$1" -c "$describe" 2>/dev/null) || return 1
    version=${found%% *}
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
        skip "$1 is Python $version, and 3.11 or later is needed" || return 1
    [ "$found" != "$existing" ] || return 0
    if ! "$1" -c 'import ensurepip, venv' 2>/dev/null; then
        remedy=
        [ ! -f /etc/debian_version ] || remedy=" (apt install python${version%.*}-venv)"
        skip "$1 is Python $version without the module venv or ensurepip$remedy" || return 1
    fi
    rm -rf "$venv"
    "$1" -m venv "$venv" || skip "$1 cannot create $venv" || return 1
    has_torch || {
        rm -rf "$venv"
        skip "the package index has no wheel of torch $torch for $1, Python $version, or cannot be reached"
    }
}

existing=
if "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    existing=$("$venv/bin/python" -c "$describe")
    [ "$wanted" ] || wanted=$venv/bin/python
fi
for python in ${wanted:-python3.14 python3.13 python3.12 python3.11 python3}; do
    if create "$python"; then
        echo "$venv: Python $version ($(command -v "$python"))"
        exit 0
    fi
done
if [ -z "$wanted" ] && command -v uv >/dev/null; then
    for version in 3.14 3.13 3.12 3.11; do
        rm -rf "$venv"
        if why=$(uv venv --quiet --seed --python "$version" "$venv" 2>&1); then
            if has_torch; then
                echo "$venv: Python $version (of uv)"
                exit 0
            fi
            why="the package index has no wheel of torch $torch for Python $version"
        fi
    done
    rm -rf "$venv"
    skip "uv provides none either: $(echo "$why" | sed -n 's/^ *//; $p')" || true
fi
echo "error: Penstock needs Python 3.11 to 3.14${wanted:+, and PYTHON is $wanted}${skipped:-; it is missing or does not run}; name one: make install PYTHON=/path/to/python" >&2
exit 1
