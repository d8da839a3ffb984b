// Sparse blocks of several tensors in a row: docs/wire-format.md, "Sparse blocks". src/lastgood/sparse/coding.py is the same in
// Python; it says what is wrong with what is refused here.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace lastgood {

constexpr std::uint64_t kBlockAlign = 8;  // each block of a group begins at a multiple of it

// What one rank sends of one tensor. `type` is the number that a block's header has: 1 float32, 3 float16, 4 bfloat16.
struct SparsePart {
    const std::uint32_t* indices = nullptr;
    std::uint64_t count = 0;
    const void* values = nullptr;
    unsigned type = 1;
    unsigned width = 1;
    bool finite = true;
    std::uint64_t elements = 0;
};

// Bytes of their blocks; 0 if one can be no block.
std::uint64_t group_bytes(const std::vector<SparsePart>& parts);

// Writes group_bytes() bytes. False, and `target` is undefined, if a part is not what a block may hold.
bool write_group(const std::vector<SparsePart>& parts, std::uint8_t* target);

// Where in a group one tensor's values are, and in an array of all indices its own.
struct FoundBlock {
    std::uint64_t values_at = 0;
    std::uint64_t count = 0;
    unsigned type = 1;
    unsigned width = 1;
    bool finite = true;
};

// Reads the headers of a group of tensors of so many elements each. False if it is none; payloads are not looked at.
bool find_blocks(const std::uint8_t* source, std::uint64_t nbytes, const std::vector<std::uint64_t>& elements,
                 std::vector<FoundBlock>& found);

// Writes all indices, one tensor's behind the other's. False if a block's payload is not valid. `found` is of find_blocks().
bool read_blocks(const std::uint8_t* source, std::uint64_t nbytes, const std::vector<std::uint64_t>& elements,
                 const std::vector<FoundBlock>& found, std::uint32_t* indices);

}  // namespace lastgood
