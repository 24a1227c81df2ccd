#!/usr/bin/env bash
# Makes .venv: pinned requirements, Horovod built once for them, and this checkout. `make demo` and `make test` call it.
#
# The wheel of Horovod is kept in ${XDG_CACHE_HOME:-~/.cache}/hvd_twobit, so that the next checkout need not build it.
# .venv/hvd_twobit.stamp says what .venv was made from. It is empty until the last step has passed: a run that failed
# or was interrupted is never taken for a finished one, and the next run starts anew.
#
# Environment: PYTHON, the interpreter to use (3.9 to 3.11); CXX, the compiler for Horovod; pip's own variables.
set -euo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
venv=$root/.venv
stamp=$venv/hvd_twobit.stamp
log=$root/build/setup.log
horovod=0.28.1
# PyTorch's build of this flavour is a tenth of the size of the one with CUDA's libraries, and all that the tests need.
flavour=cpu

export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1
unset PYTHONPATH PYTHONHOME  # packages of another environment must not pass for installed ones

fail() {
    printf 'setup: %s\n' "$@" >&2
    exit 1
}

# step LABEL COMMAND...: runs the command into the log; prints one line with its seconds, or the end of the log.
step() {
    local label=$1 start=$SECONDS status
    shift
    printf '  %-64s' "$label"
    printf '\n=== %s\n' "$label" >> "$log"
    set +e  # and not `if (...)`, which would switch off -e inside
    (set -ex; "$@") >> "$log" 2>&1 < /dev/null
    status=$?
    set -e
    if [ "$status" -ne 0 ]; then
        printf 'failed\n\n'
        tail -n 25 "$log" >&2
        printf '\n' >&2
        fail "failed: $label" "the full log: $log"
    fi
    printf '%5d s\n' $((SECONDS - start))
}

python_version() {
    "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2> /dev/null
}

# Sets $python: $PYTHON, or the first of the usual names whose version has a file of pins.
choose_python() {
    local candidate version
    for candidate in ${PYTHON:-python3 python3.11 python3.10 python3.9}; do
        version=$(python_version "$candidate") || continue
        if [ -f "$root/requirements/python$version.txt" ]; then
            python=$candidate
            pins=$root/requirements/python$version.txt
            return
        fi
    done
    version=$(python_version "${PYTHON:-python3}") || version="not found"
    fail "needs Python 3.9, 3.10 or 3.11; ${PYTHON:-python3} is: $version" \
        "(Horovod $horovod's Keras front end needs TensorFlow 2.15, which no later Python can install.)" \
        "Install one of them, with its venv and dev packages, and name it: PYTHON=python3.11 make demo"
}

# Names everything that is missing, at once, with the Debian package that has it.
check_tools() {
    local lines=() packages=() version
    missing() {
        lines+=("  $1")
        packages+=("$2")
    }
    command -v "${CXX:-g++}" > /dev/null || missing "${CXX:-g++} (a C++17 compiler)" g++
    command -v make > /dev/null || missing "make" make
    if version=$(cmake --version 2> /dev/null | sed -n '1s/[^0-9]*\([0-9.]*\).*/\1/p') && [ -n "$version" ]; then
        printf '3.13\n%s\n' "$version" | sort -C -V || missing "cmake 3.13 or newer (found $version)" cmake
    else
        missing "cmake 3.13 or newer" cmake
    fi
    "$python" -c 'import ensurepip, venv' 2> /dev/null || missing "the venv module of $python" python3-venv
    "$python" -c 'import os, sysconfig; open(os.path.join(sysconfig.get_path("include"), "Python.h")).close()' \
        2> /dev/null || missing "the C headers of $python (Python.h)" python3-dev
    if [ ${#lines[@]} -ne 0 ]; then
        fail "missing:" "${lines[@]}" "on Debian or Ubuntu: apt-get install ${packages[*]}"
    fi
    # Horovod 0.28.1's ranks end in a segmentation fault then, whatever interface they are told to use.
    getent hosts "$(uname -n)" > /dev/null ||
        fail "this machine's name, $(uname -n), has no address: add it to the line 127.0.0.1 of /etc/hosts"
}

pin() {
    sed -n "s/^$1==//p" "$pins"
}

# What .venv is made from: another of these makes another .venv. The path counts because scripts in .venv contain it.
environment_stamp() {
    {
        echo "$root"
        "$python" -c 'import sys; print(sys.version, sys.base_prefix)'
        cat "$root"/requirements/{tools,frameworks,project}.txt "$pins" "$root/scripts/setup.sh"
    } | sha256sum
}

# What installing this checkout into .venv depends on: entry points and metadata; the sources are used where they are.
project_stamp() {
    cat "$root/setup.cfg" "$root/setup.py" | sha256sum
}

pip() {
    "$venv/bin/python" -m pip "$@"
}

create_venv() {
    rm -rf "$venv"
    mkdir "$venv"
    : > "$stamp"
    "$python" -m venv "$venv"
    pip install -c "$pins" -r "$root/requirements/tools.txt"
}

# Writes to build/torch.txt the requirement that pip should install.
choose_torch() {
    local version
    version=$(pin torch)
    if pip install --dry-run --no-deps -c "$pins" "torch==$version+$flavour"; then
        echo "torch==$version+$flavour" > "$root/build/torch.txt"
        return
    fi
    # Not offered, or no index reached: in the latter case this fails too, with pip's reason.
    pip install --dry-run -c "$pins" --report "$root/build/torch.json" "torch==$version"
    echo "torch==$version" > "$root/build/torch.txt"
}

# Says so before pip downloads CUDA's libraries because its indexes offer nothing else.
warn_of_cuda() {
    if [ "$(cat "$root/build/torch.txt")" = "torch==$(pin torch)+$flavour" ] ||
        ! grep -qE '"name": "(nvidia|cuda)-' "$root/build/torch.json"; then
        return
    fi
    cat << TEXT

  The only build of PyTorch $(pin torch) that pip's indexes offer here brings NVIDIA's CUDA libraries: several GB.
  A CPU build is all that is needed. To use it, stop now (Ctrl-C), and let pip know the index of CPU wheels, which
  PyTorch's installation page shows under "Compute Platform: CPU":

      PIP_EXTRA_INDEX_URL=<that index> make demo

  Going on with the CUDA build in 10 seconds.

TEXT
    sleep 10
}

# --no-compile here and below halves the time: most modules of the frameworks are never imported.
install_torch() {
    pip install --no-compile -c "$pins" -r "$root/build/torch.txt"
}

install_requirements() {
    pip install --no-compile -c "$pins" -r "$root/requirements/frameworks.txt" -r "$root/requirements/project.txt"
}

# One job of make per core, but no more than memory allows: a compiler process takes up to 1.5 GB on PyTorch's headers.
make_jobs() {
    local cores memory
    cores=$(nproc)
    memory=$(awk '/^MemAvailable/ {print int($2 / 1500000)}' /proc/meminfo)
    if [ "$memory" -lt "$cores" ]; then cores=$memory; fi
    echo $((cores > 0 ? cores : 1))
}

# Leaves the wheel in $wheels, a folder that appears there complete or not at all.
build_horovod() {
    local building=$wheels.building
    rm -rf "$building"  # of a build that was killed
    mkdir "$building"
    # Horovod 0.28.1 asks for C++14 and PyTorch's headers for C++17: the last -std wins. -g0 halves the time.
    printf '#!/bin/sh\nexec %s "$@" -std=c++17 -g0\n' "${CXX:-g++}" > "$building/cxx"
    chmod +x "$building/cxx"
    # Its CMakeLists.txt of third parties state a minimum below 3.5, which CMake 4 refuses.
    PATH="$venv/bin:$PATH" CXX="$building/cxx" MAKEFLAGS="-j$(make_jobs)" CMAKE_POLICY_VERSION_MINIMUM=3.5 \
        HOROVOD_WITH_PYTORCH=1 HOROVOD_WITH_TENSORFLOW=1 HOROVOD_WITH_GLOO=1 \
        HOROVOD_WITHOUT_MPI=1 HOROVOD_WITHOUT_MXNET=1 \
        pip wheel --no-cache-dir --no-build-isolation --no-deps --no-binary horovod \
        --wheel-dir "$building/wheels" "horovod==$horovod"
    mv "$building/wheels" "$wheels"
    rm -rf "$building"
}

# The wheel from the cache, or built now. The lock lets one checkout build and the others wait for what it builds.
install_horovod() {
    local cache=${XDG_CACHE_HOME:-${HOME:?set HOME or XDG_CACHE_HOME}/.cache}/hvd_twobit key
    mkdir -p "$cache"
    key=$("$venv/bin/python" -c 'import platform, sys
from importlib.metadata import version
print("torch-%s-tensorflow-%s-%s-%s" % (version("torch"), version("tensorflow-cpu"), sys.implementation.cache_tag,
                                        platform.machine()))')
    wheels=$cache/horovod-$horovod-$key
    exec 8> "$wheels.lock"
    if ! flock --nonblock 8; then
        step "Horovod $horovod: waiting for another checkout's build" flock 8
    fi
    if [ -d "$wheels" ]; then
        step "Horovod $horovod: from the cache" pip install --no-deps "$wheels"/horovod-*.whl
    else
        step "Horovod $horovod: building, once; 4 to 5 minutes on 2 cores" build_horovod
        step "Horovod $horovod: installing" pip install --no-deps "$wheels"/horovod-*.whl
    fi
    exec 8>&-
}

install_project() {
    pip install --no-deps --no-build-isolation --editable "$root"
}

verify() {
    (cd / && TF_CPP_MIN_LOG_LEVEL=2 "$venv/bin/python" -c '
import hvd_twobit
import horovod.tensorflow
import horovod.torch
assert horovod.torch.gloo_built(), "Horovod was built without Gloo"
assert horovod.tensorflow.gloo_built(), "Horovod was built without Gloo"') || {
        echo "If what fails is Horovod, its wheel may not fit this machine: remove $wheels and try again."
        return 1
    }
}

choose_python
exec 9< "$root/scripts"  # one set-up at a time in one checkout
flock 9
environment=$(environment_stamp)
project=$(project_stamp)
if [ "$(cat "$stamp" 2> /dev/null)" = "$environment $project" ] && "$venv/bin/python" -c ''; then
    exit 0
fi

mkdir -p "$root/build"
: > "$log"
if [ -e "$stamp" ] && [ "$(head -c ${#environment} "$stamp")" = "$environment" ] && "$venv/bin/python" -c ''; then
    step "setup.cfg or setup.py has changed: installing hvd_twobit again" install_project
    echo "$environment $project" > "$stamp"
    exit 0
fi
if [ -e "$venv" ] && [ ! -e "$stamp" ]; then
    fail "$venv is there and was not made by this script: move it away or remove it, then try again"
fi

check_tools
echo "Setting up .venv with Python $("$python" -c 'import platform; print(platform.python_version())') (log: $log)"
step "virtual environment" create_venv
step "PyTorch $(pin torch): looking for a CPU build" choose_torch
warn_of_cuda
step "PyTorch: installing $(sed 's/torch==//' "$root/build/torch.txt")" install_torch
step "TensorFlow $(pin tensorflow-cpu) and all other requirements" install_requirements
install_horovod
step "hvd_twobit" install_project
step "checking that PyTorch, TensorFlow and Horovod load" verify
echo "$environment $project" > "$stamp"
echo "Ready in $SECONDS s"
