// RoCEv2's invariant checksum: CRC-32 (the one of Ethernet and zlib). src/lastgood/mirror/streams/icrc.py is the twin.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace lastgood::mirror {

// One way to compute CRC-32; `seed` is the checksum of what came before (0 at the start).
struct Crc32Variant {
    const char* name;
    std::uint32_t (*sum)(const void* data, std::size_t nbytes, std::uint32_t seed);
};

// The variants that this CPU can run, fastest first; the last one is "portable".
const std::vector<Crc32Variant>& crc32_variants();

// The variant of that name, or the fastest for an empty name. Throws std::invalid_argument for any other name.
const Crc32Variant& crc32_variant(const std::string& name);

// The checksum of a packet of `nbytes` from its IP header on, without the checksum; UDP's header is at `udp`, and BTH
// (12 bytes) follows within the packet.
std::uint32_t icrc(const std::uint8_t* packet, std::size_t nbytes, std::size_t udp);

}  // namespace lastgood::mirror
