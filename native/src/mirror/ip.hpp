// The IP packet in a frame, by the length fields. src/lastgood/mirror/streams/ip.py is the plain twin.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace lastgood::mirror {

inline std::uint16_t big16(const std::uint8_t* at) {
    return static_cast<std::uint16_t>(at[0] << 8 | at[1]);
}

inline std::uint32_t big32(const std::uint8_t* at) {
    return static_cast<std::uint32_t>(big16(at)) << 16 | big16(at + 2);
}

enum class Left { none, short_frame, link, not_ip, fragment, damaged, wrong_checksum };

struct IpPacket {
    std::uint8_t protocol;
    std::uint8_t address_bytes;            // 4 or 16
    const std::uint8_t* source;
    const std::uint8_t* destination;
    std::size_t begin, end, captured;      // of the payload; bytes from `captured` on are not there
};

constexpr std::uint8_t kTcp = 6, kUdp = 17;

inline Left ipv4_packet(const std::uint8_t* frame, std::size_t size, std::size_t length, std::size_t at,
                        IpPacket& packet) {
    if (size < at + 20) return Left::short_frame;
    const std::size_t header = (frame[at] & 15) * 4u;
    std::size_t total = big16(frame + at + 2);
    if (total == 0) total = length - at;  // a frame that the network card would have cut up, of more than 64 KiB
    if (frame[at] >> 4 != 4 || header < 20 || total < header || at + total > length) return Left::damaged;
    if (size < at + header) return Left::short_frame;
    if (big16(frame + at + 6) & 0x3FFF) return Left::fragment;
    const std::size_t end = at + total;
    packet = {frame[at + 9], 4, frame + at + 12, frame + at + 16, at + header, end, end < size ? end : size};
    return Left::none;
}

inline Left ipv6_packet(const std::uint8_t* frame, std::size_t size, std::size_t length, std::size_t at,
                        IpPacket& packet) {
    constexpr std::uint8_t hop_by_hop = 0, routing = 43, fragment = 44, authentication = 51, options = 60;
    if (size < at + 40) return Left::short_frame;
    if (frame[at] >> 4 != 6) return Left::damaged;
    const std::size_t payload = big16(frame + at + 4);
    std::uint8_t kind = frame[at + 6];
    std::size_t begin = at + 40;
    std::size_t jumbo = 0;
    bool is_jumbo = false;
    for (int count = 0; count < 8; ++count) {
        if (kind != hop_by_hop && kind != routing && kind != fragment && kind != authentication && kind != options)
            break;
        if (size < begin + 8) return Left::short_frame;
        std::size_t extension;
        if (kind == fragment) {
            if (big16(frame + begin + 2) & 0xFFF9) return Left::fragment;
            extension = 8;
        } else if (kind == authentication) {
            extension = (frame[begin + 1] + 2u) * 4;
        } else {
            extension = (frame[begin + 1] + 1u) * 8;
        }
        if (kind == hop_by_hop && payload == 0 && frame[begin + 2] == 0xC2 && frame[begin + 3] == 4) {
            jumbo = big32(frame + begin + 4);
            is_jumbo = true;
        }
        kind = frame[begin];
        begin += extension;
    }
    const std::size_t end = at + 40 + (payload ? payload : is_jumbo ? jumbo : length - at - 40);
    if (end > length || begin > end) return Left::damaged;
    if (size < begin) return Left::short_frame;
    packet = {kind, 16, frame + at + 8, frame + at + 24, begin, end, end < size ? end : size};
    return Left::none;
}

// `size` bytes of a frame of `length` bytes are there. `link` is as pcap files number it.
inline Left ip_packet(const std::uint8_t* frame, std::size_t size, std::size_t length, std::uint32_t link,
                      IpPacket& packet) {
    std::size_t at, kind_at;
    if (link == 1) {
        at = 14, kind_at = 12;
    } else if (link == 113) {
        at = 16, kind_at = 14;
    } else if (link == 276) {
        at = 20, kind_at = 0;
    } else {
        return Left::link;
    }
    if (size < at) return Left::short_frame;
    std::uint16_t kind = big16(frame + kind_at);
    for (int tags = 0; tags < 2 && (kind == 0x8100 || kind == 0x88A8 || kind == 0x9100); ++tags) {
        if (size < at + 4) return Left::short_frame;
        kind = big16(frame + at + 2);
        at += 4;
    }
    if (kind == 0x0800) return ipv4_packet(frame, size, length, at, packet);
    if (kind == 0x86DD) return ipv6_packet(frame, size, length, at, packet);
    return Left::not_ip;
}

}  // namespace lastgood::mirror
