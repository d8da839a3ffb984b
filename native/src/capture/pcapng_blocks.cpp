#include "capture/pcapng_blocks.hpp"

#include <cstring>

namespace lastgood {
namespace {

constexpr std::uint32_t enhanced_packet = 6;
constexpr std::size_t fixed_bytes = 28;  // type, length, interface, two halves of the time, two lengths
constexpr std::size_t flags_bytes = 12;  // the option with the direction, and the end of options
constexpr std::uint32_t flags_option = 2 | (4U << 16);
constexpr std::uint32_t outbound = 2;

unsigned char* put(unsigned char* place, std::uint32_t value) {
    std::memcpy(place, &value, sizeof value);
    return place + sizeof value;
}

}  // namespace

PcapngWritten pcapng_blocks(const unsigned char* data, std::size_t data_bytes, const Frame* table, std::size_t count,
                            std::uint32_t interface, unsigned char* out, std::size_t out_bytes) {
    PcapngWritten done = {0, 0};
    for (; done.frames < count; ++done.frames) {
        const Frame& row = table[done.frames];
        if (row.captured > most_frame_bytes || row.offset > data_bytes || row.captured > data_bytes - row.offset) break;
        const std::size_t padded = (row.captured + std::size_t{3}) / 4 * 4;
        const bool own = (row.flags & frame_own) != 0;
        const std::size_t size = fixed_bytes + padded + (own ? flags_bytes : 0) + 4;
        if (size > out_bytes - done.bytes) break;
        unsigned char* place = out + done.bytes;
        place = put(place, enhanced_packet);
        place = put(place, static_cast<std::uint32_t>(size));
        place = put(place, interface);
        place = put(place, static_cast<std::uint32_t>(row.time_ns >> 32));
        place = put(place, static_cast<std::uint32_t>(row.time_ns));
        place = put(place, row.captured);
        place = put(place, row.length);
        std::memcpy(place, data + row.offset, row.captured);
        std::memset(place + row.captured, 0, padded - row.captured);
        place += padded;
        if (own) {
            place = put(place, flags_option);
            place = put(place, outbound);
            place = put(place, 0);
        }
        put(place, static_cast<std::uint32_t>(size));
        done.bytes += size;
    }
    return done;
}

}  // namespace lastgood
