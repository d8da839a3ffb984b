// Reads a slot's stream back: parallel positional reads, every chunk checked before a byte of it is handed on.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "storage/os_io.hpp"
#include "storage/slot_writer.hpp"

namespace lastgood {

struct StreamPlace {
    int fd;
    std::uint64_t data_offset;
    std::uint64_t stream_bytes;
    std::uint64_t chunk_bytes;
    std::uint64_t sequence;
};

struct BadChunk {
    std::uint64_t index;
    std::uint32_t expected;
    std::uint32_t found;
};

// Scatters the stream, from the start of chunk `first_chunk` on, into the ranges; a range at address 0 is checked and
// skipped. Whole chunks are read and checked, also where the ranges end inside one. Returns the first chunk whose
// checksum differs from `table`; chunks before it are delivered, later ones perhaps.
std::optional<BadChunk> read_verify(const StreamPlace& place, const std::vector<std::uint32_t>& table,
                                    const std::vector<Range>& ranges, std::uint64_t first_chunk, unsigned threads,
                                    Clock::time_point deadline, const Tick& tick);

}  // namespace lastgood
