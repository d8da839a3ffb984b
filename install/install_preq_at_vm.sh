#!/usr/bin/env bash
# Brings a bare Debian or Ubuntu machine to the point where `bash install.sh` works: compiler, cmake, ninja, Python 3.11 or newer
# with headers and venv, git, openssh, pdsh; and, where it has an NVIDIA GPU, the driver and CUDA. docs/provisioning.md describes it.
#
#   bash install/install_preq_at_vm.sh              asks sudo where it must; safe to run again
#     --dry-run               print each command and run none
#     --no-gpu                leave driver and CUDA alone, also where there is a GPU
#     --no-toolkit            the driver only: torch brings its own CUDA runtime, but DeepSpeed's ops need nvcc
#     --driver-package NAME   default cuda-drivers; nvidia-open for the newest GPUs
#     --reboot                reboot by itself when the driver needs it, at most 3 times
#     --os-release FILE       describe another machine, for --dry-run: nothing is taken to be installed there
#     --root DIR              keep state, log and unit under DIR, for tests
#     --resume                what the unit calls after the reboot
#
# A new driver needs a reboot. A systemd unit then goes on by itself, and takes itself away at the end.
# State: /var/lib/lastgood/prerequisites.state; log: /var/log/lastgood-prerequisites.log
set -euo pipefail

readonly UNIT=lastgood-prerequisites.service
readonly MAX_TRIES=3
readonly NEW_PYTHON=3.12
readonly NVIDIA_REPOSITORIES=https://developer.download.nvidia.com/compute/cuda/repos
readonly KEYRING=cuda-keyring_1.1-1_all.deb
readonly BASE_PACKAGES=(ca-certificates cmake curl g++ git make ninja-build openssh-client openssh-server pdsh
    python3 python3-dev python3-venv)

fail() { printf 'install_preq_at_vm.sh: %s\n' "$*" >&2; exit 1; }
say() { printf '== %s\n' "$*"; }

given=("$@")
dry_run=no gpu=yes toolkit=yes driver=cuda-drivers reboot=no resume=no root='' os_release=''
while [ $# -gt 0 ]; do
    case $1 in
        --dry-run) dry_run=yes ;;
        --no-gpu) gpu=no ;;
        --no-toolkit) toolkit=no ;;
        --reboot) reboot=yes ;;
        --resume) resume=yes ;;
        --driver-package | --os-release | --root)
            [ $# -ge 2 ] || fail "$1 needs a value"
            case $1 in
                --driver-package) driver=$2 ;;
                --os-release) os_release=$2 ;;
                --root) root=$2 ;;
            esac
            shift ;;
        *) fail "unknown argument $1; known: --dry-run --no-gpu --no-toolkit --driver-package --reboot --os-release --root --resume" ;;
    esac
    shift
done
[[ $driver =~ ^[a-z0-9][a-z0-9.+-]*$ ]] || fail "--driver-package $driver: not the name of a Debian package"
[ -z "$os_release" ] || [ "$dry_run" = yes ] || [ -n "$root" ] || fail "--os-release describes another machine: add --dry-run"
# Then nothing is known but its name: all is shown that a bare one of it with a GPU would need.
other_machine=no
if [ -n "$os_release" ] && [ -z "$root" ]; then other_machine=yes; fi

state_folder=$root/var/lib/lastgood
state_file=$state_folder/prerequisites.state
log_file=$root/var/log/lastgood-prerequisites.log
unit_file=$root/etc/systemd/system/$UNIT

# -- what machine this is ------------------------------------------------------------------------------------------

[ "$(uname -s)" = Linux ] || fail "this is $(uname -s); Lastgood runs on Linux"

os_release_value() { sed -n "s/^$1=\"\{0,1\}\([^\"]*\)\"\{0,1\}\$/\1/p" "${os_release:-/etc/os-release}" | head -n 1; }

readonly SUPPORTED="Ubuntu 20.04, 22.04, 24.04 and Debian 12, 13"
[ -r "${os_release:-/etc/os-release}" ] || fail "${os_release:-/etc/os-release} cannot be read; supported: $SUPPORTED"
os="$(os_release_value ID) $(os_release_value VERSION_ID)"
case $os in
    "ubuntu 20.04") nvidia_name=ubuntu2004 own_python=no ;;
    "ubuntu 22.04") nvidia_name=ubuntu2204 own_python=no ;;
    "ubuntu 24.04") nvidia_name=ubuntu2404 own_python=yes ;;
    "debian 12") nvidia_name=debian12 own_python=yes ;;
    "debian 13") nvidia_name=debian13 own_python=yes ;;
    *)
        found=$(os_release_value PRETTY_NAME)
        fail "this is ${found:-$os} (ID and VERSION_ID in ${os_release:-/etc/os-release}: $os); supported: $SUPPORTED. Elsewhere install" \
            "by hand: git, a C++17 compiler, Python 3.11 or newer with headers and venv, openssh, pdsh, and the GPU's driver" ;;
esac
case $(uname -m) in
    x86_64) nvidia_architecture=x86_64 ;;
    aarch64) nvidia_architecture=sbsa ;;
    *) fail "this is a $(uname -m) machine; supported: x86_64, aarch64" ;;
esac

if [ "$dry_run" = no ] && [ -z "$root" ] && [ "$(id -u)" -ne 0 ]; then
    command -v sudo >/dev/null || fail "run this as root, or install sudo"
    exec sudo bash "$(readlink -f "${BASH_SOURCE[0]}")" "${given[@]}"
fi

# -- running, or only saying ---------------------------------------------------------------------------------------

changed=no
export DEBIAN_FRONTEND=noninteractive

# Bounded: another apt, as clouds start at the first boot, is waited for, but not for ever.
apt=(apt-get -o DPkg::Lock::Timeout=600 -o Acquire::Retries=3)

run() {
    changed=yes
    printf '+'
    printf ' %q' "$@"
    printf '\n'
    [ "$dry_run" = yes ] || "$@" || fail "this command failed, with exit code $?: $*; mend that and run this again, it goes on from there"
}

installed() {
    [ "$other_machine" = no ] && [ "$(dpkg-query -W -f '${db:Status-Status}' "$1" 2>/dev/null)" = installed ]
}

apt_updated=no
install_packages() {
    local package missing=()
    for package in "$@"; do installed "$package" || missing+=("$package"); done
    [ ${#missing[@]} -gt 0 ] || return 0
    [ "$apt_updated" = yes ] || run "${apt[@]}" update
    apt_updated=yes
    run "${apt[@]}" install -y --no-install-recommends "${missing[@]}"
}

if [ "$dry_run" = no ]; then
    mkdir -p "$state_folder" "$(dirname "$log_file")"
    # The unit's output goes to the log alone; a person sees it as well.
    if [ "$resume" = yes ]; then exec >>"$log_file" 2>&1; else exec > >(tee -a "$log_file") 2>&1; fi
    exec 9>"$state_folder/lock"
    flock -w 3600 9 || fail "another run of this script has not ended for an hour; see $log_file"
    say "$(date -u +%FT%TZ) $os, kernel $(uname -r)"
fi

# -- state across the reboot ---------------------------------------------------------------------------------------

phase=new tries=0 boot=''
boot_id() { cat "$root/proc/sys/kernel/random/boot_id"; }

read_state() {
    local key value
    if [ "$other_machine" = yes ] || [ ! -r "$state_file" ]; then return; fi
    while IFS='=' read -r key value; do
        case $key in
            phase) phase=$value ;;
            boot) boot=$value ;;
            tries) if [[ $value =~ ^[0-9]{1,3}$ ]]; then tries=$value; fi ;;
        esac
    done <"$state_file"
}

write_state() {
    phase=$1
    if [ "$dry_run" = yes ]; then return; fi
    printf 'phase=%s\ntries=%s\nboot=%s\n' "$phase" "$tries" "$boot" >"$state_file.new"
    sync "$state_file.new"
    mv "$state_file.new" "$state_file"
}

go_on_after_reboot() {
    local kept=$state_folder/install_preq_at_vm.sh options=(--resume --driver-package "$driver")
    [ "$reboot" = no ] || options+=(--reboot)
    [ "$toolkit" = yes ] || options+=(--no-toolkit)
    [ -z "$root" ] || options+=(--root "$root")
    [ -z "$os_release" ] || options+=(--os-release "$os_release")
    if ! command -v systemctl >/dev/null && [ "$dry_run" = no ]; then
        say "there is no systemd here: after the reboot run this script again"
        return
    fi
    # A copy: the checkout may have moved by then.
    run install -D -m 0755 "$(readlink -f "${BASH_SOURCE[0]}")" "$kept"
    printf '+ write %s\n' "$unit_file"
    if [ "$dry_run" = no ]; then
        mkdir -p "$(dirname "$unit_file")"
        cat >"$unit_file" <<UNIT
[Unit]
Description=The prerequisites of Lastgood, continued after a reboot
Wants=network-online.target
After=network-online.target

[Service]
Type=oneshot
ExecStart=/bin/bash $kept ${options[*]}
TimeoutStartSec=2h

[Install]
WantedBy=multi-user.target
UNIT
    fi
    run systemctl daemon-reload
    run systemctl enable "$UNIT"
}

no_more_reboots() {
    if [ "$other_machine" = yes ] || [ ! -e "$unit_file" ]; then return; fi
    run systemctl disable "$UNIT"
    run rm -f "$unit_file"
    run systemctl daemon-reload
}

end() {
    # Read by install/ansible/provision.yml.
    printf 'changed: %s\nreboot: %s\n' "$changed" "$1"
    exit 0
}

need_reboot() {
    if [ "$reboot" = yes ]; then
        run systemctl reboot
    else
        say "the driver needs a reboot: sudo reboot. The rest goes on by itself; log: $log_file"
    fi
    end needed
}

# -- steps ---------------------------------------------------------------------------------------------------------

has_gpu() {
    local device
    if [ "$other_machine" = yes ]; then return; fi
    for device in "$root"/sys/bus/pci/devices/*; do
        [ -r "$device/vendor" ] || continue
        # A display or 3D controller of NVIDIA's.
        if [ "$(cat "$device/vendor")" = 0x10de ] && [[ $(cat "$device/class") == 0x03* ]]; then return 0; fi
    done
    return 1
}

driver_loaded() { [ "$other_machine" = no ] && [ -e "$root/proc/driver/nvidia/version" ]; }

# Debian 12's and 13's Python, and Ubuntu 24.04's, are new enough. Ubuntu 20.04 and 22.04 have 3.8 and 3.10 (22.04 also a release
# candidate of 3.11): they get a Python of their own from uv, which is a PyPI package and fetches Python's standalone builds.
provide_python() {
    [ "$own_python" = no ] || return 0
    local link=$root/usr/local/bin/python$NEW_PYTHON tools=$root/opt/lastgood/uv pythons=$root/opt/lastgood/python
    if [ "$other_machine" = no ] && [ -x "$link" ]; then return; fi
    run python3 -m venv "$tools"
    run "$tools/bin/python" -m pip install --quiet --upgrade pip
    run "$tools/bin/python" -m pip install --quiet uv
    run env "UV_PYTHON_INSTALL_DIR=$pythons" "$tools/bin/uv" python install "$NEW_PYTHON"
    run sh -c 'ln -sfn "$(UV_PYTHON_INSTALL_DIR="$1" "$2" python find --python-preference only-managed "$3")" "$4"' sh \
        "$pythons" "$tools/bin/uv" "$NEW_PYTHON" "$link"
}

nvidia_repository() {
    if installed cuda-keyring; then return; fi
    local folder
    if [ "${os%% *}" = debian ]; then
        # Parts of the driver's packages depend on Debian's contrib. Files that name it already stay as they are.
        run sh -c 'for file in "$1/etc/apt/sources.list" "$1"/etc/apt/sources.list.d/debian.*; do
            [ ! -f "$file" ] || sed -i -E "/contrib/! { /^deb .* main/ s/ main/ main contrib/; /^Components:/ s/\$/ contrib/ }" "$file"
        done' sh "$root"
        apt_updated=no
    fi
    folder=/tmp
    if [ "$dry_run" = no ]; then folder=$(mktemp -d); fi
    run curl --fail --silent --show-error --location --retry 3 --max-time 300 --output "$folder/$KEYRING" \
        "$NVIDIA_REPOSITORIES/$nvidia_name/$nvidia_architecture/$KEYRING"
    run dpkg -i "$folder/$KEYRING"
    [ "$dry_run" = yes ] || rm -rf "$folder"
    apt_updated=no
}

kernel_headers() {
    local kernel=KERNEL
    if [ "$other_machine" = no ]; then kernel=$(uname -r); fi
    install_packages "linux-headers-$kernel"
}

provide_toolkit() {
    if [ "$toolkit" = no ] || { [ "$other_machine" = no ] && [ -x "$root/usr/local/cuda/bin/nvcc" ]; }; then return; fi
    nvidia_repository
    install_packages cuda-toolkit
}

finish() {
    no_more_reboots
    if [ "$phase" != 'done' ]; then write_state 'done'; fi
    if [ "$changed" = no ]; then say "nothing to do"; fi
    local python=python3
    if [ "$own_python" = no ]; then python=python$NEW_PYTHON; fi
    say "next: PYTHON=$python bash install.sh"
    end no
}

give_up() {
    write_state failed
    no_more_reboots
    fail "$*. Then run this script again; state: $state_file, log: $log_file"
}

after_reboot() {
    if [ "$(boot_id)" != "$boot" ]; then
        tries=$((tries + 1))
        boot=$(boot_id)
        write_state reboot
    elif ! driver_loaded; then
        say "not rebooted yet"
        # From the unit, a reboot of this same boot could only be a loop.
        if [ "$resume" = yes ]; then end needed; else need_reboot; fi
    fi
    if ! driver_loaded; then
        if [ "$tries" -ge "$MAX_TRIES" ]; then
            give_up "the NVIDIA driver ($driver) is still not loaded after $tries reboots; look at: dkms status;" \
                "journalctl -k | grep -i nvidia; is secure boot on (mokutil --sb-state)?"
        fi
        say "the driver is not loaded after reboot $tries of at most $MAX_TRIES: building it for this kernel"
        kernel_headers
        run dkms autoinstall
        need_reboot
    fi
    # A toolkit that cannot be installed must not be tried at every boot from now on.
    if [ "$tries" -gt "$MAX_TRIES" ]; then give_up "this did not come to its end in $MAX_TRIES boots; the log says why"; fi
    say "driver: $(head -n 1 "$root/proc/driver/nvidia/version")"
    provide_toolkit
    finish
}

read_state
if [ "$resume" = yes ]; then
    case $phase in
        reboot) after_reboot ;;
        *)
            no_more_reboots
            say "nothing to go on with: the phase is $phase"
            end no ;;
    esac
fi

install_packages "${BASE_PACKAGES[@]}"
provide_python
if [ "$gpu" = no ]; then finish; fi
if ! has_gpu; then
    say "no NVIDIA GPU on this machine's PCI bus: no driver, Lastgood runs on the CPU"
    finish
fi
# Where there is no systemd, or a person comes before it.
if [ "$phase" = reboot ]; then after_reboot; fi
if driver_loaded; then
    say "driver: $(head -n 1 "$root/proc/driver/nvidia/version")"
    provide_toolkit
    finish
fi
kernel_headers
nvidia_repository
install_packages "$driver"
tries=0
if [ "$dry_run" = no ]; then boot=$(boot_id); fi
write_state reboot
go_on_after_reboot
if [ "$dry_run" = yes ] && [ "$toolkit" = yes ]; then
    say "after the reboot:"
    install_packages cuda-toolkit
fi
need_reboot
