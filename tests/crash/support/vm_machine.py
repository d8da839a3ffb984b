"""A small virtual machine whose disk is recorded: QEMU without hardware help, a Debian kernel, a busybox for its init.

The host's root file system is shared with it, read-only, so that it runs this very Python, with this very Lastgood, on
an ext4 file system of its own. Nothing is downloaded. docs/power-cuts.md names the Debian packages.
"""

from __future__ import annotations

import json
import lzma
import os
import re
import select
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from vm_guest import END

from lastgood.processes import die_with_parent

KERNEL_VARIABLE = "LASTGOOD_VM_KERNEL"
DISK_BYTES = 48 << 20
HERE = Path(__file__).resolve().parent

_MODULES = ("virtio_pci", "virtio_blk", "crc32c_generic", "ext4", "9pnet_virtio", "9p")
_TOOLS = {
    "qemu-system-x86_64": "qemu-system-x86",
    "busybox": "busybox-static",
    "mkfs.ext4": "e2fsprogs",
    "mount": "mount",
    "unshare": "util-linux",
}
"""Program: Debian package."""
_INIT = """\
#!/bin/busybox sh
/bin/busybox --install -s /bin
export PATH=/bin
trap 'poweroff -f' EXIT
set -e
mount -t devtmpfs dev /dev
exec </dev/null >/dev/console 2>&1
mount -t proc proc /proc
for module in $(cat /modules/order); do insmod /modules/$module.ko; done
mount -t 9p -o ro,trans=virtio,version=9p2000.L,cache=loose,msize=262144 host /host
mount -t devtmpfs dev /host/dev
mount -t proc proc /host/proc
mount -t ext4 /dev/vda /host{disk}
chroot /host /usr/bin/env -i PATH=/usr/bin:/bin PYTHONDONTWRITEBYTECODE=1 PYTHONPATH={paths} \\
    {command} >/dev/ttyS1
umount /host{disk}
"""


class Unavailable(Exception):
    """This machine cannot run the virtual machine: the text says what it lacks."""


@dataclass(frozen=True)
class Kernel:
    """A kernel's image and the folder of its modules."""

    image: Path
    modules: Path


@dataclass(frozen=True)
class Recording:
    """What one run of the virtual machine left.

    `reports` holds, for each step in the order in which they were reported durable, how many bytes the log had when
    the report was read: the report relies on nothing behind them.
    """

    before: Path
    after: Path
    log: Path
    reports: list[tuple[int, int]]


def tools() -> dict[str, str]:
    """The path of each program. Raises Unavailable, naming the Debian packages."""
    path = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"
    found = {name: shutil.which(name, path=path) for name in _TOOLS}
    missing = [f"{name} (Debian: {_TOOLS[name]})" for name, place in found.items() if place is None]
    if missing:
        raise Unavailable(f"not installed: {', '.join(missing)}")
    paths = {name: place for name, place in found.items() if place is not None}
    if b"/ld-linux" in Path(paths["busybox"]).read_bytes():
        raise Unavailable(f"{paths['busybox']} is not linked statically (Debian: busybox-static)")
    devices = subprocess.run([paths["qemu-system-x86_64"], "-device", "help"], capture_output=True, timeout=60).stdout
    if b'"virtio-9p-pci"' not in devices:
        raise Unavailable(f"{paths['qemu-system-x86_64']} was built without virtio-9p")
    return paths


def find_kernel() -> Kernel:
    """The kernel that LASTGOOD_VM_KERNEL names, else the newest of /boot. Raises Unavailable."""
    named = os.environ.get(KERNEL_VARIABLE)
    images = [Path(named)] if named else sorted(Path("/boot").glob("vmlinuz-*"), key=_by_version, reverse=True)
    reasons = []
    for image in images:
        release = image.name.removeprefix("vmlinuz-")
        root = image.resolve().parent.parent
        folders = [root / "lib/modules" / release, root / "usr/lib/modules" / release]
        folder = next((folder for folder in folders if folder.is_dir()), None)
        if not image.is_file() or folder is None:
            reasons.append(f"{image} with {folders[0]} is not there")
            continue
        try:
            _modules_in_order(folder)
        except Unavailable as error:
            reasons.append(str(error))
            continue
        return Kernel(image, folder)
    raise Unavailable(
        f"no kernel for the virtual machine ({'; '.join(reasons) or 'none in /boot'}): install linux-image-amd64, or "
        f"unpack that package with dpkg-deb -x and set {KERNEL_VARIABLE} to its boot/vmlinuz-VERSION"
    )


def record(folder: Path, *, lying: bool = False, timeout_s: float = 600.0) -> Recording:
    """Run vm_guest.py in a virtual machine and record its disk; `folder`, which must be new, takes its files.

    Raises Unavailable; AssertionError, with the console, where the guest fails or is not done after `timeout_s`.
    """
    found, kernel = tools(), find_kernel()
    folder.mkdir()
    before, after, log, console = (folder / name for name in ("before.img", "after.img", "log", "console.txt"))
    mount_point = folder / "disk"  # the guest sees it through the share, and mounts its disk there
    mount_point.mkdir()
    initramfs = _make_initramfs(folder, found["busybox"], kernel, mount_point, lying=lying)
    before.touch()
    os.truncate(before, DISK_BYTES)
    no_late_work = "lazy_itable_init=0,lazy_journal_init=0"
    subprocess.run(
        [found["mkfs.ext4"], "-q", "-b", "4096", "-I", "256", "-E", no_late_work, before], check=True, timeout=60
    )
    shutil.copyfile(before, after)
    log.touch()
    command = _qemu_command(found["qemu-system-x86_64"], kernel.image, initramfs, after, log, console)
    parent = os.getpid()
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        preexec_fn=lambda: die_with_parent(parent),
    )  # fmt: skip
    try:
        lines = _read_lines(process, log, time.monotonic() + timeout_s)
        process.wait(60)
    finally:
        process.kill()
        trouble = process.communicate(timeout=60)[1].decode(errors="replace")
    if not lines or lines[-1][0] != END:
        shown = "\n".join(console.read_text(errors="replace").splitlines()[-40:]) if console.exists() else ""
        raise AssertionError(f"the guest did not finish in {timeout_s:.0f} s; QEMU: {trouble}\nconsole:\n{shown}")
    reports = [(int(line.removeprefix("durable ")), log_bytes) for line, log_bytes in lines[:-1]]
    return Recording(before, after, log, reports)


def _by_version(image: Path) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", image.name)]


def _modules_in_order(folder: Path) -> list[Path]:
    """The files of all modules that the guest needs and that are not built in, each behind those it depends on."""
    # The package brings no modules.dep; each module names what it needs.
    files = {path.name.partition(".")[0].replace("-", "_"): path for path in folder.rglob("*.ko*")}
    built_in = {
        Path(line).stem.replace("-", "_") for line in (folder / "modules.builtin").read_text().splitlines() if line
    }
    order: list[Path] = []

    def take(name: str) -> None:
        if name in built_in or files.get(name) in order:
            return
        if name not in files:
            raise Unavailable(f"{folder} has no module {name} (linux-image-cloud-amd64 has no 9p)")
        depends = re.search(rb"\0depends=([^\0]*)\0", b"\0" + _module(files[name]))
        for other in depends[1].decode().split(",") if depends and depends[1] else []:
            take(other.replace("-", "_"))
        order.append(files[name])

    for name in _MODULES:
        take(name)
    return order


def _module(path: Path) -> bytes:
    content = path.read_bytes()
    if path.suffix == ".xz":
        return lzma.decompress(content)
    if path.suffix != ".ko":
        raise Unavailable(f"{path} is compressed in a way that this test does not read")
    return content


def _make_initramfs(folder: Path, busybox: str, kernel: Kernel, mount_point: Path, *, lying: bool) -> Path:
    root = folder / "initramfs"
    for name in ("bin", "dev", "proc", "host", "modules"):
        (root / name).mkdir(parents=True)
    shutil.copy(busybox, root / "bin" / "busybox")
    modules = {path.name.partition(".")[0]: path for path in _modules_in_order(kernel.modules)}
    for name, path in modules.items():
        (root / "modules" / f"{name}.ko").write_bytes(_module(path))
    (root / "modules" / "order").write_text("\n".join(modules) + "\n")
    command = [sys.executable, str(HERE / "vm_guest.py"), str(mount_point / "job"), "lying" if lying else "honest"]
    init = root / "init"
    init.write_text(
        _INIT.format(
            disk=shlex.quote(str(mount_point)),
            paths=shlex.quote(str(HERE.parents[1] / "storage" / "support")),
            command=shlex.join(command),
        )
    )
    init.chmod(0o755)
    names = "".join(f"{path.relative_to(root)}\n" for path in sorted(root.rglob("*")))
    packed = folder / "initramfs.cpio"
    with packed.open("wb") as file:
        subprocess.run(
            [busybox, "cpio", "-o", "-H", "newc"],
            input=names.encode(), stdout=file, stderr=subprocess.DEVNULL, cwd=root, check=True, timeout=60,
        )  # fmt: skip
    return packed


def _qemu_command(qemu: str, kernel: Path, initramfs: Path, disk: Path, log: Path, console: Path) -> list[str]:
    # Below the recorder, flushes do nothing: only the log counts, and the host's disk need not be kept busy.
    plain = {"driver": "file", "cache": {"no-flush": True}}
    recorder = {
        "driver": "blklogwrites",
        "node-name": "recorded",
        "file": {**plain, "filename": str(disk)},
        "log": {**plain, "filename": str(log)},
        "log-sector-size": 512,
        "log-super-update-interval": 1,
    }
    return [
        qemu, "-machine", "q35", "-accel", "tcg", "-cpu", "max", "-smp", "1", "-m", "512",
        "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot",
        "-kernel", str(kernel), "-initrd", str(initramfs),
        "-append", "console=ttyS0 panic=-1 quiet",
        "-chardev", f"file,id=console,path={_quoted(console)}", "-serial", "chardev:console",
        "-chardev", "stdio,id=reports,signal=off", "-serial", "chardev:reports",
        "-fsdev", "local,id=host,path=/,security_model=none,readonly=on,multidevs=remap",
        "-device", "virtio-9p-pci,fsdev=host,mount_tag=host",
        "-blockdev", json.dumps(recorder),
        "-device", "virtio-blk-pci,drive=recorded,logical_block_size=512,physical_block_size=512",
    ]  # fmt: skip


def _quoted(path: Path) -> str:
    return str(path).replace(",", ",,")


def _read_lines(process: subprocess.Popen[bytes], log: Path, deadline: float) -> list[tuple[str, int]]:
    """Each line of the guest, and the length of the log just after it was read; until QEMU ends or the deadline."""
    assert process.stdout is not None
    source = process.stdout.fileno()
    lines: list[tuple[str, int]] = []
    pending = b""
    while (left := deadline - time.monotonic()) > 0:
        if not select.select([source], [], [], left)[0]:
            break
        got = os.read(source, 4096)
        log_bytes = log.stat().st_size
        if not got:
            break
        *whole, pending = (pending + got).split(b"\n")
        lines += [(line.decode().strip(), log_bytes) for line in whole]
    return lines
