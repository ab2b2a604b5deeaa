# shellcheck shell=bash
# Functions that set this project up; source it, then call what you need. Nothing happens on sourcing.
#
#   chain_setup           .venv with everything the lock files name; returns at once when it is there already
#   chain_models [ARGS]   the models, sentence model included (scripts/prepare_models does it); returns at once when they are there
#   chain_suffix_setup    drafts by suffix decoding (compiles arctic-inference); fails where that is not possible
#   chain_preload         prints the LD_PRELOAD value vLLM wants on a CPU
#   chain_machine         prints gpu or cpu
#
# CHAIN_PYTHON names another Python 3.11; CHAIN_MACHINE=cpu|gpu overrides the detection.

chain_root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
chain_venv="$chain_root/.venv"
chain_locks="$chain_root/requirements"
chain_torch_index="https://download.pytorch.org/whl/cpu"

chain_say() {
    printf '%s\n' "$*"
}

chain_die() {
    printf '%s: %s\n' "${0##*/}" "$*" >&2
    exit 1
}

# Is somebody watching a terminal?
chain_interactive() {
    [[ -t 1 && -z "${CI:-}" ]]
}

chain_machine() {
    if [[ -n "${CHAIN_MACHINE:-}" ]]; then
        [[ "$CHAIN_MACHINE" == cpu || "$CHAIN_MACHINE" == gpu ]] || chain_die "CHAIN_MACHINE is '$CHAIN_MACHINE': cpu or gpu"
        printf '%s\n' "$CHAIN_MACHINE"
    elif command -v nvidia-smi >/dev/null && timeout 20 nvidia-smi -L 2>/dev/null | grep -q '^GPU'; then
        printf 'gpu\n'
    else
        printf 'cpu\n'
    fi
}

# Lock files of a kind of machine, in the order of installation.
chain_lock_files() {
    local name names="installer cpu cpu-nodeps dev"
    [[ "$1" == gpu ]] && names="installer gpu dev"
    for name in $names; do
        printf '%s\n' "$chain_locks/$name.lock"
    done
}

chain_find_python() {
    local candidate
    for candidate in "${CHAIN_PYTHON:-}" python3.11 python3 /usr/bin/python3.11; do
        [[ -n "$candidate" ]] || continue
        if "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then
            if "$candidate" -c 'import ensurepip, venv' 2>/dev/null; then
                command -v "$candidate"
                return
            fi
            chain_die "$candidate has no venv module. Install it: apt-get install python3.11-venv"
        fi
    done
    chain_die "Python 3.11 is needed and was not found. Install it: apt-get install python3.11 python3.11-venv" \
        "(Debian 12; elsewhere https://www.python.org or uv python install 3.11), or name one with CHAIN_PYTHON"
}

# What an up-to-date .venv was made of. Its scripts name its own path, so the path counts; settings of linters do not.
chain_stamp() {
    local files
    mapfile -t files < <(chain_lock_files "$1")
    {
        printf '%s\n%s\n' "$1" "$chain_venv"
        cat -- "${files[@]}"
        sed '/^\[tool\.ruff/,$d' "$chain_root/pyproject.toml"
    } | sha256sum | cut -d ' ' -f 1
}

chain_stamped() {
    [[ -x "$chain_venv/bin/python" && -f "$chain_venv/.chain-stamp" ]] &&
        [[ "$(<"$chain_venv/.chain-stamp")" == "$1" ]]
}

chain_pip() {
    local quiet=(--quiet --progress-bar off)
    chain_interactive && quiet=(--progress-bar on)
    # PIP_USER and the like would install past the .venv.
    env -u PIP_USER -u PIP_TARGET -u PIP_PREFIX -u PYTHONHOME PIP_ROOT_USER_ACTION=ignore PIP_DISABLE_PIP_VERSION_CHECK=1 \
        PIP_NO_INPUT=1 "$chain_venv/bin/python" -m pip "$1" "${quiet[@]}" "${@:2}" </dev/null
}

# chain_step TEXT COMMAND...: says what is done and how long it took; a failure exits with what to do about it (`set -e`
# would not: bash ignores it inside anything that is followed by `||`).
# Standard error goes to a log; progress bars stay on the terminal.
chain_step() {
    local text="$1" began=$SECONDS log="$chain_venv/.chain-log"
    shift
    chain_say "  $text"
    printf '== %s\n' "$text" >>"$log"
    if ! "$@" 2>>"$log"; then
        {
            printf '%s: failed: %s\n' "${0##*/}" "$text"
            sed -n '/^== /h;/^== /!H;${x;p}' "$log" | grep -v '^$' | tail -n 12 | sed 's/^/    /'
            printf '  %s\n' "All of it: $log"
            chain_advice "$log"
        } >&2
        chain_nothing_copied "$log" && rm -f -- "$chain_venv/.chain-installing"
        exit 1
    fi
    chain_say "  $text: done in $((SECONDS - began)) s"
}

# Did the last step fail before pip copied anything (it fetches all of a list first)? Then the next run goes on from here.
chain_nothing_copied() {
    ! grep -q 'No space left' "$1" && tail -n 5 "$1" | grep -qE 'No matching distribution|Could not find a version|HTTPSConnectionPool|ReadTimeout'
}

# The most likely cause of a failed pip run, from its log.
chain_advice() {
    local tail
    tail="$(tail -n 60 "$1")"
    case "$tail" in
        *"No space left"*)
            printf '  The disk is full: about 6 GB are needed on a CPU machine, 20 GB on a GPU machine.\n' ;;
        *"ProxyError"* | *"Connection"* | *"connection"* | *"Temporary failure"* | *"timed out"* | *"SSLError"* | *"NewConnection"*)
            printf '  The package index cannot be reached: check the network, HTTPS_PROXY, and PIP_INDEX_URL if you use a mirror.\n'
            printf '  A folder with wheels fetched elsewhere (torch, say) can be named with PIP_FIND_LINKS.\n' ;;
        *"Could not find a version"* | *"No matching distribution"*)
            printf '  The index lacks this release: check PIP_INDEX_URL, pip.conf, and that this is Linux on x86-64.\n' ;;
        *"CMake Error"* | *"error: command"* | *"g++"* | *"Python.h"*)
            printf '  It could not be compiled: apt-get install g++ python3.11-dev\n' ;;
        *)
            printf '  Running the same command again starts over.\n' ;;
    esac
}

# The CPU build of torch is on some default indexes (or in find-links); PyTorch's own index has it always.
chain_install_torch_cpu() {
    local pin
    pin="$(grep -oE '^torch==[^ ]+' "$chain_locks/cpu.lock")"
    chain_pip install --no-deps "$pin" && return
    printf '%s is not on the default index; trying %s\n' "$pin" "$chain_torch_index" >&2
    chain_say "  (not on the default index: from $chain_torch_index)"
    chain_pip install --no-deps --index-url "$chain_torch_index" "$pin"
}

# A whole import of the engine, so that a stamp is only ever given to what works.
chain_check_imports() {
    HF_HUB_OFFLINE=1 VLLM_LOGGING_LEVEL=ERROR "$chain_venv/bin/python" -c 'import ray, vllm, torch, onnxruntime, hw' </dev/null
}

chain_setup() {
    local machine want
    machine="$(chain_machine)" || return 1
    want="$(chain_stamp "$machine")"
    chain_stamped "$want" && return
    # One at a time: the lock goes with the subshell, also when that is killed.
    (
        exec 9>"$chain_root/.venv.lock" || exit 1
        if ! flock -n 9; then
            chain_say "Another run is installing into .venv: waiting for it"
            flock 9 || exit 1
        fi
        chain_stamped "$want" && exit 0
        chain_install "$machine" "$want"
    ) || exit 1
}

# chain_install MACHINE STAMP, under the lock.
chain_install() {
    local machine="$1" want="$2" python lock broken=""
    local locks
    mapfile -t locks < <(chain_lock_files "$machine")

    # pip cannot see that a package was left half-copied; so an interrupted installation is not continued.
    [[ -e "$chain_venv/.chain-installing" ]] && broken="an installation was interrupted"
    if [[ -z "$broken" && -d "$chain_venv" ]]; then
        # A moved .venv runs, but its scripts name the old place.
        "$chain_venv/bin/python" -c "import sys; sys.exit(sys.version_info[:2] != (3, 11) or sys.prefix != sys.argv[1])" \
            "$chain_venv" 2>/dev/null || broken="it is not a Python 3.11 environment of this folder"
    fi
    if [[ -n "$broken" ]]; then
        chain_say "Making .venv anew: $broken"
        rm -rf -- "$chain_venv" || exit 1
    fi
    python="$(chain_find_python)" || exit 1
    chain_say "Setting up .venv for a $machine machine (once; a few minutes)"
    if [[ ! -d "$chain_venv" ]]; then
        mkdir -- "$chain_venv" || exit 1
        : >"$chain_venv/.chain-installing"
        chain_step "create the environment with $python" "$python" -m venv "$chain_venv"
    fi
    : >"$chain_venv/.chain-installing" || exit 1
    : >"$chain_venv/.chain-log"
    rm -f -- "$chain_venv/.chain-stamp" || exit 1

    for lock in "${locks[@]}"; do
        if [[ "$lock" == */cpu.lock ]]; then
            chain_step "install torch, CPU build" chain_install_torch_cpu
        fi
        chain_step "install requirements/${lock##*/} ($(grep -cE '^[A-Za-z0-9]' "$lock") packages)" \
            chain_pip install --no-deps -r "$lock"
    done
    chain_step "install this project" chain_pip install --no-deps --no-build-isolation -e "$chain_root"
    chain_step "try it: import ray, vllm, torch, onnxruntime" chain_check_imports
    printf '%s\n' "$want" >"$chain_venv/.chain-stamp.new" && mv -f -- "$chain_venv/.chain-stamp.new" "$chain_venv/.chain-stamp" || exit 1
    rm -f -- "$chain_venv/.chain-installing"
}

chain_models() {
    PYTHONPATH="$chain_root${PYTHONPATH:+:$PYTHONPATH}" "$chain_venv/bin/python" -m hw.onnx.prepare "$@"
}

# Suffix decoding is compiled on the spot: there are no wheels. Without a compiler, or if it fails, drafts by look-up take its
# place; a failure is remembered, so that not every start pays for another try (scripts/setup --suffix tries again).
chain_suffix_setup() {
    local stamp="$chain_venv/.chain-suffix-stamp" want python="$chain_venv/bin/python"
    want="$(cat -- "$chain_locks/suffix-build.lock" "$chain_locks/suffix.lock" "$chain_venv/.chain-stamp" | sha256sum | cut -d ' ' -f 1)"
    [[ -f "$stamp" && "$(<"$stamp")" == "$want" ]] && return
    [[ "${1:-}" != again && -f "$stamp" && "$(<"$stamp")" == "failed $want" ]] && return 1
    if ! command -v g++ >/dev/null || ! "$python" -c 'import os, sysconfig; os.stat(os.path.join(sysconfig.get_path("include"), "Python.h"))' 2>/dev/null; then
        chain_say "No C++ compiler with Python's headers: drafting by prompt look-up instead of suffix decoding" \
            "(apt-get install g++ python3.11-dev, then scripts/setup --suffix)"
        return 1
    fi
    (
        exec 9>"$chain_root/.venv.lock" || exit 1
        flock 9 || exit 1
        [[ -f "$stamp" && "$(<"$stamp")" == "$want" ]] && exit 0
        printf 'failed %s\n' "$want" >"$stamp" || exit 1
        chain_say "Setting up suffix decoding (once; a minute)"
        chain_step "install requirements/suffix-build.lock" chain_pip install --no-deps -r "$chain_locks/suffix-build.lock"
        chain_step "compile arctic-inference" chain_build_arctic
        chain_step "try it" "$chain_venv/bin/python" -c 'from arctic_inference.suffix_decoding import SuffixDecodingCache'
        printf '%s\n' "$want" >"$stamp" || exit 1
    )
}

# Its CMake file looks for nanobind with whatever Python CMake finds first: name ours.
chain_build_arctic() {
    local nanobind
    nanobind="$("$chain_venv/bin/python" -m nanobind --cmake_dir)" || return 1
    PATH="$chain_venv/bin:$PATH" ARCTIC_MINIMAL_BUILD=1 \
        CMAKE_ARGS="-DPython_EXECUTABLE=$chain_venv/bin/python -Dnanobind_DIR=$nanobind" \
        chain_pip install --no-deps --no-build-isolation -r "$chain_locks/suffix.lock"
}

# Intel's OpenMP from .venv and tcmalloc where the system has it. On GPU machines: nothing.
chain_preload() {
    local library found=()
    [[ "$(chain_machine)" == cpu ]] || return 0
    for library in "$chain_venv/lib/libiomp5.so" /usr/lib/*-linux-gnu/libtcmalloc_minimal.so.4 /usr/lib64/libtcmalloc_minimal.so.4; do
        [[ -e "$library" ]] && found+=("$library")
    done
    local IFS=:
    printf '%s\n' "${found[*]-}"
}
