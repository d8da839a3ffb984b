#include "mirror/sockets_bindings.hpp"

#include <nanobind/stl/map.h>
#include <nanobind/stl/string.h>

#include <mutex>

#include "mirror/gloo.hpp"
#include "python.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace lastgood {
namespace {

using namespace mirror;

template <typename Row>
nb::bytes table(const std::vector<Row>& rows) {
    return nb::bytes(reinterpret_cast<const char*>(rows.data()), rows.size() * sizeof(Row));
}

nb::tuple ends(const Key& key, int side) {
    const End& source = key[static_cast<std::size_t>(side)];
    const End& destination = key[static_cast<std::size_t>(1 - side)];
    return nb::make_tuple(nb::bytes(reinterpret_cast<const char*>(source.address.data()), source.address_bytes),
                          source.port,
                          nb::bytes(reinterpret_cast<const char*>(destination.address.data()),
                                    destination.address_bytes),
                          destination.port);
}

class GlooStreams {
  public:
    GlooStreams(std::uint64_t keep_bytes, std::uint64_t keep_all_bytes, std::uint64_t blind_bytes,
                std::uint64_t max_connections)
        : parser_(gloo_framing(), {keep_bytes, keep_all_bytes, blind_bytes, max_connections}) {}

    nb::tuple feed(std::uintptr_t data, std::size_t size, std::uintptr_t frames, std::size_t count) {
        {
            const GilReleased released;
            const std::lock_guard<std::mutex> lock(mutex_);
            parser_.feed(reinterpret_cast<const std::uint8_t*>(data), size, reinterpret_cast<const Frame*>(frames),
                         count);
        }
        return take();
    }

    nb::tuple finish() {
        {
            const GilReleased released;
            const std::lock_guard<std::mutex> lock(mutex_);
            parser_.finish();
        }
        return take();
    }

    std::map<std::string, std::uint64_t> counters() {
        const GilReleased released;
        const std::lock_guard<std::mutex> lock(mutex_);
        return parser_.counters();
    }

  private:
    nb::tuple take() {
        Gather& gather = parser_.gather();
        nb::list opened, closed, resynced, refused;
        for (const OpenedFlow& one : gather.opened)
            opened.append(nb::make_tuple(one.index, ends(one.ends, one.side), one.connector, one.from_the_beginning));
        for (const std::uint32_t flow : gather.tables.closed) closed.append(flow);
        for (const auto& one : gather.tables.resynced) resynced.append(nb::make_tuple(one.first, one.second));
        for (const Refused& one : gather.refused) refused.append(nb::make_tuple(ends(one.ends, 0), one.tls));
        nb::tuple found = nb::make_tuple(opened, closed, table(gather.tables.heads), table(gather.tables.pieces),
                                         table(gather.tables.lost), resynced, refused);
        gather.tables.closed.clear();
        gather.tables.heads.clear();
        gather.tables.pieces.clear();
        gather.tables.lost.clear();
        gather.tables.resynced.clear();
        gather.opened.clear();
        gather.refused.clear();
        return found;
    }

    std::mutex mutex_;
    SocketParser parser_;
};

}  // namespace

void bind_mirror_sockets(nb::module_& module) {
    nb::class_<GlooStreams>(module, "GlooStreams", "Gloo's messages in frames; lastgood.mirror.streams.native uses it.")
        .def(nb::init<std::uint64_t, std::uint64_t, std::uint64_t, std::uint64_t>(), "keep_bytes"_a,
             "keep_all_bytes"_a, "blind_bytes"_a, "max_connections"_a)
        .def("feed", &GlooStreams::feed, "data"_a, "size"_a, "frames"_a, "count"_a,
             "Read `count` frames (rows of FRAME at `frames`) of `size` bytes at `data`.")
        .def("finish", &GlooStreams::finish, "Nothing more comes.")
        .def("counters", &GlooStreams::counters, "What was counted, without zeros.");
}

}  // namespace lastgood
