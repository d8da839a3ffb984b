// Pieces of a message to their places in a buffer. The plain twin is tests/mirror/support/plain/scatter.py.
#include "mirror/scatter_bindings.hpp"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "python.hpp"

namespace lastgood {

namespace {

// As lastgood.mirror.streams.messages.PIECE.
struct Piece {
    std::uint32_t flow;
    std::uint32_t pad;
    std::uint64_t message;
    std::uint64_t offset;
    std::uint64_t address;
    std::uint64_t nbytes;
};
static_assert(sizeof(Piece) == 40);

using Ranges = std::vector<std::pair<std::uint64_t, std::uint64_t>>;

Ranges scatter_pieces(std::uintptr_t memory, std::uint64_t memory_bytes, std::uint64_t begin, std::uint64_t end,
                      std::uintptr_t pieces, std::uint64_t count) {
    const GilReleased released;
    Ranges written;
    if (begin > end || end > memory_bytes) return written;
    const std::uint64_t room = end - begin;
    auto* const base = reinterpret_cast<std::uint8_t*>(memory) + begin;
    for (std::uint64_t i = 0; i < count; ++i) {
        Piece piece;
        std::memcpy(&piece, reinterpret_cast<const std::uint8_t*>(pieces) + i * sizeof piece, sizeof piece);
        if (piece.offset >= room || piece.nbytes == 0) continue;
        const std::uint64_t bytes = std::min(piece.nbytes, room - piece.offset);
        std::memcpy(base + piece.offset, reinterpret_cast<const std::uint8_t*>(piece.address), bytes);
        const std::uint64_t low = begin + piece.offset;
        if (!written.empty() && written.back().second == low) {
            written.back().second = low + bytes;
        } else {
            written.emplace_back(low, low + bytes);
        }
    }
    return written;
}

}  // namespace

void bind_scatter(nanobind::module_& module) {
    using nanobind::arg;
    module.def("scatter_pieces", &scatter_pieces, arg("memory"), arg("memory_bytes"), arg("begin"), arg("end"),
               arg("pieces"), arg("count"),
               "Copy pieces of a message, which is bytes begin to end of a buffer, to their places; the ranges written.");
}

}  // namespace lastgood
