#!/usr/bin/env bash
# Installs the Debian or Ubuntu packages that some tests need, those that are missing and no others; safe to run again.
# No service is started or left enabled: the tests run their own servers. Without root and without a sudo that asks nothing
# it changes nothing and says which tests are skipped; without apt-get as well.
set -euo pipefail

say() { printf 'test_prerequisites.sh: %s\n' "$*"; }

# A line each: the program that a test looks for, its package, the tests.
needs='
sshd openssh-server tests/multinode, tests/cluster/provision
ip iproute2 tests/multinode
shellcheck shellcheck tests/test_install_preq_at_vm.py
munged munge tests/multinode
slurmctld slurmctld tests/multinode
slurmd slurmd tests/multinode
srun slurm-client tests/multinode
pdsh pdsh tests/multinode
ethtool ethtool tests/test_nics.py
iperf3 iperf3 tests/benchmarks
mpirun openmpi-bin tests/multinode
'

PATH=$PATH:/usr/sbin:/sbin
packages=()
while read -r program package tests; do
    [ -n "$program" ] || continue
    command -v "$program" >/dev/null || { say "$program is missing ($package, for $tests)"; packages+=("$package"); }
done <<<"$needs"
if [ ${#packages[@]} -eq 0 ]; then
    say "nothing is missing"
    exit 0
fi

if ! command -v apt-get >/dev/null; then
    say "no apt-get here: install these by hand, or their tests are skipped"
    exit 0
fi
as_root=()
if [ "$(id -u)" -ne 0 ]; then
    if ! sudo -n true 2>/dev/null; then
        say "this needs root: run it with sudo, or these tests are skipped"
        exit 0
    fi
    as_root=(sudo)
fi

# Debian starts services at their installation, unless this file says no (101).
policy=/usr/sbin/policy-rc.d
made_policy=no
remove_policy() { [ "$made_policy" = no ] || "${as_root[@]}" rm -f "$policy"; }
trap remove_policy EXIT
if [ ! -e "$policy" ]; then
    made_policy=yes
    printf '#!/bin/sh\nexit 101\n' | "${as_root[@]}" tee "$policy" >/dev/null
    "${as_root[@]}" chmod 755 "$policy"
fi

say "installing ${packages[*]}"
"${as_root[@]}" apt-get update -qq
"${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=300 install -y -qq --no-install-recommends "${packages[@]}"

# Nor may it start at the next boot. Only what was not there before is touched.
for package in "${packages[@]}"; do
    case $package in
        openssh-server) units="ssh.service ssh.socket" ;;
        munge | slurmctld | slurmd) units=$package.service ;;
        *) continue ;;
    esac
    for unit in $units; do
        [ ! -e "/lib/systemd/system/$unit" ] || "${as_root[@]}" env DPKG_MAINTSCRIPT_PACKAGE="$package" deb-systemd-helper disable "$unit"
    done
done
say "done"
