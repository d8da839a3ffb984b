// What a batch of frames gives: the tables of src/lastgood/mirror/streams/messages.py.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace lastgood::mirror {

struct Head {
    std::uint32_t flow, opcode;
    std::uint64_t message, slot, nbytes, time_ns;
};

struct Piece {
    std::uint32_t flow, pad;
    std::uint64_t message, offset, address, nbytes;
};

struct Lost {
    std::uint32_t flow, pad;
    std::uint64_t message, offset, nbytes;
};

static_assert(sizeof(Head) == 40 && sizeof(Piece) == 40 && sizeof(Lost) == 32, "as numpy's dtypes have them");

struct Tables {
    std::vector<std::uint32_t> closed;
    std::vector<Head> heads;
    std::vector<Piece> pieces;
    std::vector<Lost> lost;
    std::vector<std::pair<std::uint32_t, std::string>> resynced;
};

}  // namespace lastgood::mirror
