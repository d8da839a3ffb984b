// CRC32C (Castagnoli, reflected, initial and final inversion), as in iSCSI, ext4 and google-crc32c.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace lastgood {

// One way to compute the checksum. `seed` is the checksum of what came before (0 at the start).
struct Crc32cVariant {
    const char* name;
    std::uint32_t (*sum)(const void* data, std::size_t nbytes, std::uint32_t seed);
    // Copies `nbytes` from `source` to `target` and returns the checksum, in one pass over memory.
    std::uint32_t (*copy)(void* target, const void* source, std::size_t nbytes, std::uint32_t seed);
};

// The variants that this CPU can run, fastest first; the last one is "portable".
const std::vector<Crc32cVariant>& crc32c_variants();

// The variant of that name, or the fastest for an empty name. "none" copies and sums nothing: it shows what checksums
// cost, and what is written with it verifies nowhere. Throws std::invalid_argument for any other name.
const Crc32cVariant& crc32c_variant(const std::string& name);

std::uint32_t crc32c(const void* data, std::size_t nbytes, std::uint32_t seed);
std::uint32_t copy_crc32c(void* target, const void* source, std::size_t nbytes, std::uint32_t seed);

// The seed of a chunk's checksum: CRC32C over its sequence and index, both little-endian 64-bit. A chunk of another
// checkpoint, or one that landed in the wrong place, does not pass for the right one.
std::uint32_t chunk_seed(std::uint64_t sequence, std::uint64_t index);

}  // namespace lastgood
