#include "capture/bindings.hpp"

#include <nanobind/stl/pair.h>

#include <utility>

#include "capture/frame_ring.hpp"
#include "capture/packet_blocks.hpp"
#include "capture/pcapng_blocks.hpp"
#include "python.hpp"

namespace nb = nanobind;
using nb::literals::operator""_a;

namespace lastgood {
namespace {

unsigned char* bytes_at(std::uintptr_t address) { return reinterpret_cast<unsigned char*>(address); }

Frame* frames_at(std::uintptr_t address) { return reinterpret_cast<Frame*>(address); }

void bind_packet_blocks(nb::module_& module) {
    nb::class_<PacketBlocks>(module, "PacketBlocks",
                             "Frames out of an AF_PACKET socket's ring (TPACKET_V3), which lies at `address`.")
        .def(
            "__init__",
            [](PacketBlocks* self, std::uintptr_t address, std::size_t block_bytes, std::size_t blocks,
               std::uint32_t link) {
                if (block_bytes < 4096 || block_bytes % 4096 != 0 || blocks == 0 || address % 8 != 0) {
                    throw nb::value_error("a ring has at least one block, and blocks are of complete pages");
                }
                new (self) PacketBlocks(bytes_at(address), block_bytes, blocks, link);
            },
            "address"_a, "block_bytes"_a, "blocks"_a, "link"_a)
        .def(
            "read",
            [](PacketBlocks& self, int fd, std::uintptr_t table, std::size_t limit, double timeout_s) {
                const GilReleased released;
                return self.read(fd, frames_at(table), limit, timeout_s);
            },
            "fd"_a, "table"_a, "limit"_a, "timeout_s"_a,
            "Fill up to `limit` rows of FRAME at address `table` from one block, which is the caller's until it is\n"
            "released. 0: none came in time; below 0: minus the errno of the socket.")
        .def("release", &PacketBlocks::release, "Give the oldest block that was read to its end back; False: none is.")
        .def_prop_ro("oldest", &PacketBlocks::oldest, "The number of that block; below 0: there is none.")
        .def("counters", [](const PacketBlocks& self) {
            const PacketBlocks::Counters& found = self.counters();
            nb::dict counters;
            counters["frames"] = found.frames;
            counters["bytes"] = found.bytes;
            counters["truncated"] = found.truncated;
            counters["no_checksum"] = found.no_checksum;
            counters["vlan_restored"] = found.vlan_restored;
            counters["own"] = found.own;
            counters["damaged_blocks"] = found.damaged_blocks;
            return counters;
        });
}

void bind_frame_ring(nb::module_& module) {
    module.attr("FRAME_RING_HEADER_BYTES") = frame_ring_header_bytes;
    module.attr("FRAME_RING_LEAST_DATA_BYTES") = frame_ring_least_data_bytes;
    nb::class_<FrameRing>(module, "FrameRing",
                          "One side of a ring of frames in the `nbytes` of shared memory at `address`. ValueError where\n"
                          "there is none; RuntimeError where the other side left what cannot be.")
        .def_static(
            "format",
            [](std::uintptr_t address, std::size_t nbytes, std::uint32_t link) {
                FrameRing::format(bytes_at(address), nbytes, link);
            },
            "address"_a, "nbytes"_a, "link"_a, "Make an empty ring of memory that is all zero.")
        .def(
            "__init__",
            [](FrameRing* self, std::uintptr_t address, std::size_t nbytes, bool writer) {
                new (self) FrameRing(bytes_at(address), nbytes, writer);
            },
            "address"_a, "nbytes"_a, "writer"_a)
        .def(
            "write",
            [](FrameRing& self, std::uintptr_t data, std::size_t data_bytes, std::uintptr_t table, std::size_t count,
               bool drop) {
                const GilReleased released;
                return self.write(bytes_at(data), data_bytes, frames_at(table), count, drop);
            },
            "data"_a, "data_bytes"_a, "table"_a, "count"_a, "drop"_a,
            "Copy frames in until one does not fit; with `drop` the others count as dropped. Returns how many are done.")
        .def(
            "wait_freed",
            [](FrameRing& self, double timeout_s) {
                const GilReleased released;
                return self.wait_freed(timeout_s);
            },
            "timeout_s"_a, "Wait until the reader gave something back since the last `write`; False if it did not.")
        .def("end", &FrameRing::end, "Nothing more will be written.")
        .def(
            "read",
            [](FrameRing& self, std::uintptr_t table, std::size_t limit, double timeout_s) {
                const GilReleased released;
                return self.read(frames_at(table), limit, timeout_s);
            },
            "table"_a, "limit"_a, "timeout_s"_a,
            "Give the last batch back, then fill up to `limit` rows of FRAME; offsets count from the start of the ring.")
        .def("give_back", &FrameRing::give_back, "Give the last batch back before the next read.")
        .def_prop_ro("ended", &FrameRing::ended, "Whether the writer said so.")
        .def_prop_ro("drained", &FrameRing::drained, "Whether the reader has been given everything.")
        .def_prop_ro("link", [](const FrameRing& self) { return self.header().link; })
        .def("counters", [](const FrameRing& self) {
            const FrameRingHeader& header = self.header();
            nb::dict counters;
            counters["data_bytes"] = header.data_bytes;
            counters["held_bytes"] = header.head.load() - header.tail.load();
            counters["offered_frames"] = header.sequence.load();
            counters["dropped_frames"] = header.dropped_frames.load();
            counters["dropped_bytes"] = header.dropped_bytes.load();
            counters["taken_frames"] = header.taken_frames.load();
            counters["missing_frames"] = self.missing_frames();
            return counters;
        });
}

}  // namespace

void bind_capture(nb::module_& module) {
    bind_packet_blocks(module);
    bind_frame_ring(module);
    module.def(
        "pcapng_blocks",
        [](std::uintptr_t data, std::size_t data_bytes, std::uintptr_t table, std::size_t count, std::uint32_t interface,
           std::uintptr_t out, std::size_t out_bytes) {
            const GilReleased released;
            const PcapngWritten done = pcapng_blocks(bytes_at(data), data_bytes, frames_at(table), count, interface,
                                                     bytes_at(out), out_bytes);
            return std::make_pair(done.frames, done.bytes);
        },
        "data"_a, "data_bytes"_a, "table"_a, "count"_a, "interface"_a, "out"_a, "out_bytes"_a,
        "Write frames as enhanced packet blocks while they fit; returns how many, and their bytes.");
}

}  // namespace lastgood
