# Sourced by the scripts: makes .venv and installs hvdkit into it with the given extras.

venv="$root/.venv"

# Errors go to standard error, in one line that says what to do.
fail() {
    echo "${0##*/}: $*" >&2
    exit 1
}

# install_hvdkit EXTRAS: hvdkit, editable, with EXTRAS (comma-separated) at the tested versions.
install_hvdkit() {
    local python="${PYTHON:-python3}"
    command -v "$python" >/dev/null || fail "no $python here; install Python 3.11 to 3.13, or set PYTHON"
    "$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' ||
        fail "$("$python" --version) is not supported; set PYTHON to a Python 3.11 to 3.13"
    if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
        "$python" -m venv --clear "$venv" ||
            fail "cannot make $venv; on Debian and Ubuntu: apt-get install python3-venv"
    fi
    # pip takes seconds to find that nothing is missing, so a file records what was installed.
    local wanted stamp="$venv/.hvdkit-installed"
    wanted="$1 $(cat "$root/pyproject.toml" "$root/scripts/constraints.txt" | cksum)"
    if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
        rm -f "$stamp"
        "$venv/bin/python" -m pip install --quiet --disable-pip-version-check \
            --constraint "$root/scripts/constraints.txt" --editable "$root[$1]" ||
            fail "pip could not install hvdkit[$1]; its message is above"
        remove_broken_torchvision
        echo "$wanted" >"$stamp"
    fi
    export PATH="$venv/bin:$PATH"
}

# Remove torchvision if it does not load beside the installed build of torch, as that of the package
# index beside torch for CPUs. litdata requires torchvision, but does not need it; Lightning imports
# torchvision if it is installed.
remove_broken_torchvision() {
    local python="$venv/bin/python"
    ! "$python" -m pip show --quiet torchvision >/dev/null 2>&1 ||
        "$python" -c 'import torchvision' >/dev/null 2>&1 || {
        "$python" -m pip uninstall --quiet --yes torchvision &&
            echo "removed torchvision, which does not load beside this build of torch"
    }
}

# Check that the compiler and the headers for the engine's build are installed, before gigabytes are
# downloaded. With an engine in the cache no build may be needed.
check_build_tools() {
    local cache="${HVDKIT_CACHE_DIR:-${XDG_CACHE_HOME:-$HOME/.cache}/hvdkit}" header compiler
    [ -z "$(ls "$cache/wheels" 2>/dev/null)" ] || return 0
    for compiler in ${CXX:-c++ g++ clang++}; do
        command -v "$compiler" >/dev/null && break
        compiler=
    done
    [ -n "$compiler" ] || fail "the engine's build needs a C++ compiler, and there is no ${CXX:-c++, g++ or clang++} \
here; on Debian and Ubuntu: apt-get install g++ python3-dev"
    header="$("${PYTHON:-python3}" -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h"
    [ -f "$header" ] || fail "the engine's build needs Python's headers, and there is no $header; \
on Debian and Ubuntu: apt-get install python3-dev"
}
