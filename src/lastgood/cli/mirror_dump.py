"""`lastgood mirror dump`: frames of an interface or a file into another process's ring (docs/flowcheck-capture.md)."""

from __future__ import annotations

import threading
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lastgood.cli._mirror_stages import Core, pin, print_line, stop_by_signal
from lastgood.cli._output import console
from lastgood.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from lastgood.mirror.capture.frames import FrameSource

__all__ = ["dump"]


def dump(
    interface: Annotated[
        list[str] | None, typer.Option(help="Interface to capture on, as mir0; several share one ring. Needs root.")
    ] = None,
    pcap: Annotated[Path | None, typer.Option(help="A pcap or pcapng file instead of an interface.")] = None,
    dpdk: Annotated[
        str | None,
        typer.Option(metavar="DEVICE", help="A port of DPDK: a PCI address, or as net_af_packet0,iface=mir0."),
    ] = None,
    queues: Annotated[int, typer.Option(help="With --dpdk: queues of the port.")] = 1,
    dma: Annotated[int, typer.Option(help="With --dpdk: DMA engines that copy; 0: the processor does.")] = 0,
    dma_device: Annotated[
        list[str] | None, typer.Option(help="PCI address of each such engine [default: engines in software].")
    ] = None,
    hugepages: Annotated[bool, typer.Option("--hugepages", help="With --dpdk: take memory in huge pages.")] = False,
    ring: Annotated[
        str | None,
        typer.Option(help="Ring that another process reads [default: /dev/shm/lastgood-frames]; - for none."),
    ] = None,
    ring_size: Annotated[str, typer.Option(metavar="SIZE", help="Of that ring.")] = "64MiB",
    kernel_ring: Annotated[
        str, typer.Option(metavar="SIZE", help="Of the kernel's ring: a step's traffic.")
    ] = "256MiB",
    block: Annotated[str, typer.Option(metavar="SIZE", help="Of the kernel ring's blocks.")] = "1MiB",
    keep: Annotated[Path | None, typer.Option(help="Also write all frames to this new pcapng file.")] = None,
    keep_size: Annotated[str, typer.Option(metavar="SIZE", help="At most so large.")] = "1GiB",
    own: Annotated[bool, typer.Option("--own/--no-own", help="Also frames that this host sends there.")] = True,
    core: Core = None,
    seconds: Annotated[float | None, typer.Option(metavar="S", help="End after so long.")] = None,
    patience: Annotated[float, typer.Option(metavar="S", help="With --pcap: longest wait for the reader.")] = 60.0,
    report: Annotated[
        float, typer.Option(metavar="S", help="Print all counters as a line of JSON every so often; 0: at the end.")
    ] = 0.0,
) -> None:
    """Capture frames for another process, and count each one that is lost on the way. Ends with SIGTERM or Ctrl-C.

    An interface is never waited for: what does not fit the ring is dropped, and counted. A file waits for its reader.
    """
    from lastgood.mirror.capture.dump import Dump
    from lastgood.mirror.capture.keep import KEEP_BUFFER_BYTES, FrameKeeper
    from lastgood.mirror.capture.memory import check_memory, memory_lines
    from lastgood.mirror.capture.ring import DEFAULT_RING, RingWriter
    from lastgood.units import option_bytes

    if sum(map(bool, (interface, pcap, dpdk))) != 1:
        raise ConfigError("name one of --interface, --pcap and --dpdk")
    if dpdk is not None and (keep is not None or ring == "-"):
        raise ConfigError("--dpdk fills a ring, and keeps no file: give --ring a path, and no --keep")
    sizes = {
        "ring": option_bytes("--ring-size", ring_size),
        "kernel": option_bytes("--kernel-ring", kernel_ring),
        "block": option_bytes("--block", block),
        "keep": option_bytes("--keep-size", keep_size),
    }
    needs = {"kernel ring": sizes["kernel"]} if interface else {}
    if ring != "-":
        needs["ring"] = sizes["ring"]
    port = None
    if dpdk is not None:
        from lastgood.mirror.capture.dpdk import DpdkPort

        port = DpdkPort(
            dpdk, queues=queues, dma=dma, dma_devices=tuple(dma_device or ()), core=core, hugepages=hugepages
        )
        needs["DPDK's buffers"] = port.memory_bytes
    if keep is not None:
        needs["buffer of kept frames"] = KEEP_BUFFER_BYTES
    check_memory(needs)
    console.print(f"mirror dump: memory: {'; '.join(memory_lines(needs))}")
    stop = stop_by_signal()
    if seconds is not None:
        timer = threading.Timer(seconds, stop.set)
        timer.daemon = True
        timer.start()
    path = DEFAULT_RING if ring is None else Path(ring)
    if port is not None:
        from lastgood.mirror.capture.dpdk import dpdk_program, run_dpdk
        from lastgood.mirror.capture.frames import ETHERNET

        dpdk_program()
        with closing(RingWriter(path, sizes["ring"], ETHERNET)) as writer:
            console.print(f"mirror dump: frames of {dpdk} go to {path}; end it with Ctrl-C")
            print_line(run_dpdk(port, writer, stop, _printer(report) if report > 0 else None))
        return
    if core is not None:
        pin(core)
    with ExitStack() as stack:
        source = stack.enter_context(closing(_source(interface or [], pcap, sizes["kernel"], sizes["block"], own)))
        kept = None if keep is None else stack.enter_context(closing(FrameKeeper(keep, sizes["keep"])))
        filled = None
        if ring != "-":
            filled = stack.enter_context(closing(RingWriter(path, sizes["ring"], source.link_type)))
            console.print(
                f"mirror dump: frames of {', '.join(interface or [str(pcap)])} go to {path}; end it with Ctrl-C"
            )
        running = Dump(source, ring=filled, keep=kept, drop=pcap is None, patience_s=patience)
        running.run(stop, _printer(report) if report > 0 else None)
        print_line(running.counters())
        for why in (getattr(source, "damage", None), kept and kept.stopped):
            if why:
                console.print(f"mirror dump: not all of it: {why}")


def _source(interfaces: list[str], pcap: Path | None, ring_bytes: int, block_bytes: int, own: bool) -> FrameSource:
    if pcap is not None:
        from lastgood.mirror.capture.files import CaptureFile

        return CaptureFile(pcap)
    from lastgood.mirror.capture.interface import InterfaceSource

    first, *also = interfaces
    return InterfaceSource(first, also=also, ring_bytes=ring_bytes, block_bytes=block_bytes, own_frames=own)


def _printer(every_s: float) -> Callable[[dict[str, Any]], None]:
    import time

    due = time.monotonic() + every_s

    def print_when_due(found: dict[str, Any]) -> None:
        nonlocal due
        if time.monotonic() >= due:
            due = time.monotonic() + every_s
            print_line(found)

    return print_when_due
