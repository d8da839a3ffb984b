// Frames as enhanced packet blocks of a pcapng file.
#pragma once

#include <cstddef>
#include <cstdint>

#include "capture/frame.hpp"

namespace lastgood {

struct PcapngWritten {
    std::size_t frames;  // of the table, from its start
    std::size_t bytes;   // of `out`
};

// Writes as many frames as fit `out`; all of one interface, whose times are in nanoseconds. Frames that lie outside the
// data end it.
PcapngWritten pcapng_blocks(const unsigned char* data, std::size_t data_bytes, const Frame* table, std::size_t count,
                            std::uint32_t interface, unsigned char* out, std::size_t out_bytes);

}  // namespace lastgood
