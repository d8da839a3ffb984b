#include "mirror/roce_bindings.hpp"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <stdexcept>

#include "mirror/icrc.hpp"
#include "mirror/roce_parser.hpp"
#include "python.hpp"

namespace nb = nanobind;
using nb::literals::operator""_a;

namespace lastgood::mirror {
namespace {

const std::uint8_t* bytes_at(std::uintptr_t address) { return reinterpret_cast<const std::uint8_t*>(address); }

const Frame* frames_at(std::uintptr_t address) { return reinterpret_cast<const Frame*>(address); }

template <typename Row>
nb::bytes rows(const std::vector<Row>& table) {
    return nb::bytes(reinterpret_cast<const char*>(table.data()), table.size() * sizeof(Row));
}

RoceProtocol protocol_of(const std::string& name) {
    if (name == "auto") return RoceProtocol::automatic;
    if (name == "simple") return RoceProtocol::simple;
    if (name == "ll") return RoceProtocol::ll;
    if (name == "ll128") return RoceProtocol::ll128;
    throw std::invalid_argument("no protocol '" + name + "'");
}

nb::tuple as_tuple(const RoceOutput& output) {
    nb::list opened;
    std::uint32_t number = output.first_opened;
    for (const RoceOpened& one : output.opened) {
        opened.append(nb::make_tuple(number++, nb::bytes(one.source.data(), one.source.size()),
                                     nb::bytes(one.destination.data(), one.destination.size()), one.port, one.queue,
                                     one.from_start));
    }
    nb::list resynced;
    for (const auto& one : output.tables.resynced) resynced.append(nb::make_tuple(one.first, one.second));
    nb::list closed;
    for (const std::uint32_t flow : output.tables.closed) closed.append(flow);
    return nb::make_tuple(opened, closed, rows(output.tables.heads), rows(output.tables.pieces),
                          rows(output.tables.lost), resynced);
}

}  // namespace

void bind_roce(nb::module_& module) {
    module.def(
        "crc32",
        [](nb::bytes data, std::uint32_t seed, const std::string& variant) {
            return crc32_variant(variant).sum(data.c_str(), data.size(), seed);
        },
        "data"_a, "seed"_a = 0, nb::kw_only(), "variant"_a = "");
    module.def("crc32_variants", [] {
        std::vector<std::string> names;
        for (const Crc32Variant& variant : crc32_variants()) names.emplace_back(variant.name);
        return names;
    });
    module.def(
        "icrc",
        [](nb::bytes packet, std::size_t udp) {
            if (packet.size() < udp + 20) throw std::invalid_argument("a packet has UDP's and BTH's headers");
            return icrc(reinterpret_cast<const std::uint8_t*>(packet.c_str()), packet.size(), udp);
        },
        "packet"_a, "udp"_a);
    nb::class_<RoceParser>(module, "RoceParser")
        .def(
            "__init__",
            [](RoceParser* self, const std::string& protocol, std::size_t patience, std::size_t most_waiting_bytes,
               bool striped) {
                new (self) RoceParser(protocol_of(protocol), patience, most_waiting_bytes, striped);
            },
            "protocol"_a, "patience"_a, "most_waiting_bytes"_a, "striped"_a)
        .def(
            "feed",
            [](RoceParser& self, std::uintptr_t data, std::size_t nbytes, std::uintptr_t frames, std::size_t count) {
                const RoceOutput* output;
                {
                    const GilReleased released;
                    output = &self.feed(bytes_at(data), nbytes, frames_at(frames), count);
                }
                return as_tuple(*output);
            },
            "data"_a, "nbytes"_a, "frames"_a, "count"_a)
        .def("finish", [](RoceParser& self) { return as_tuple(self.finish()); })
        .def("counters", [](const RoceParser& self) {
            nb::dict counters;
            for (std::size_t which = 0; which < std::size_t(RoceCount::end); ++which) {
                const std::uint64_t value = self.counter(RoceCount(which));
                if (value != 0) counters[roce_count_name(RoceCount(which))] = value;
            }
            return counters;
        });
    module.def(
        "icrc_copy_frames",
        [](std::uintptr_t data, std::uintptr_t frames, std::size_t count, std::uintptr_t target, std::size_t head,
           std::size_t udp) {
            const GilReleased released;
            auto* to = reinterpret_cast<std::uint8_t*>(target);
            std::uint64_t right = 0;
            for (std::size_t number = 0; number < count; ++number) {
                const Frame& frame = frames_at(frames)[number];
                const std::uint8_t* const packet = bytes_at(data) + frame.offset + head;
                const std::size_t nbytes = frame.captured - head - 4;
                if (frame.captured < head + udp + 24) continue;
                std::uint32_t sent;
                std::memcpy(&sent, packet + nbytes, 4);
                right += icrc(packet, nbytes, udp) == sent;
                std::memcpy(to, packet + udp + 20, nbytes - udp - 20);
                to += nbytes - udp - 20;
            }
            return right;
        },
        "data"_a, "frames"_a, "count"_a, "target"_a, "head"_a, "udp"_a,
        "For benchmarks: check the ICRC of frames with known headers and copy what follows BTH; returns how many\n"
        "checksums are right.");
}

}  // namespace lastgood::mirror
