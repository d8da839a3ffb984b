// A captured frame in a table, as FRAME in src/lastgood/mirror/capture/frames.py.
#pragma once

#include <cstddef>
#include <cstdint>

namespace lastgood {

struct Frame {
    std::uint64_t offset;  // of its first byte, in the batch's data
    std::uint32_t captured;
    std::uint32_t length;  // on the wire
    std::uint64_t time_ns;
    std::uint32_t flags;
    std::uint32_t link;
};
static_assert(sizeof(Frame) == 32);

constexpr std::uint32_t frame_no_checksum = 1;
constexpr std::uint32_t frame_truncated = 2;
constexpr std::uint32_t frame_vlan_restored = 4;
constexpr std::uint32_t frame_own = 8;
constexpr std::uint32_t most_frame_bytes = 1U << 18;

}  // namespace lastgood
