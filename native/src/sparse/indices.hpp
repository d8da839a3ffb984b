// Indices of a sparse block as bytes: docs/wire-format.md, "Sparse blocks".
#pragma once

#include <cstddef>
#include <cstdint>

namespace lastgood {

enum class IndexCoding : std::uint8_t { all = 0, bits = 1, low_8 = 2, low_16 = 3, numbers = 4 };

// The length of `count` indices below `places`. Throws std::invalid_argument for what no block has.
std::uint64_t index_bytes(IndexCoding coding, std::uint64_t places, std::uint64_t count);

// Writes `count` ascending indices below `places` as index_bytes() bytes at `target`.
// Throws std::invalid_argument, before it writes beyond them, if they are not that.
void write_indices(IndexCoding coding, const std::uint32_t* indices, std::uint64_t count, std::uint64_t places,
                   std::uint8_t* target);

// Reads index_bytes() bytes from `source` into `count` numbers at `target`. False if there are not exactly so many, or
// bits beyond the last place; whether the numbers ascend, and are below `places`, is still to be seen.
bool read_indices(IndexCoding coding, const std::uint8_t* source, std::uint64_t places, std::uint64_t count,
                  std::uint32_t* target);

}  // namespace lastgood
