#include "mirror/tcp.hpp"

#include <algorithm>
#include <cstdlib>
#include <cstring>

namespace lastgood::mirror {
namespace {

constexpr std::uint8_t kFin = 1, kSyn = 2, kRst = 4, kAck = 16;
constexpr std::uint64_t kStoredBytes = 128;  // what keeping a segment takes beside its bytes
constexpr std::int64_t kFarthest = std::int64_t{1} << 30;

End end_of(const std::uint8_t* address, std::uint8_t address_bytes, std::uint16_t port) {
    End end;
    std::memcpy(end.address.data(), address, address_bytes);
    end.address_bytes = address_bytes;
    end.port = port;
    return end;
}

bool is_end(const End& end, const std::uint8_t* address, std::uint8_t address_bytes, std::uint16_t port) {
    return end.port == port && end.address_bytes == address_bytes &&
           std::memcmp(end.address.data(), address, address_bytes) == 0;
}

constexpr std::size_t kChecksumAt = 16;

std::uint16_t folded(std::uint64_t total) {
    while (total >> 16) total = (total & 0xFFFF) + (total >> 16);
    return static_cast<std::uint16_t>(total);
}

// The sum of big-endian words of 16 bits in ones' complement, the last one filled up with zero.
std::uint16_t words(const std::uint8_t* content, std::size_t size) {
    // The sum of words in the other byte order is the sum with its bytes swapped (RFC 1071), and longer words fold to
    // shorter ones: so whole registers are added in the machine's own (little-endian) order.
    std::uint64_t total = 0;
    std::size_t at = 0;
    for (; at + 4 <= size; at += 4) {
        std::uint32_t word;
        std::memcpy(&word, content + at, 4);
        total += word;
    }
    std::uint32_t rest = 0;
    std::memcpy(&rest, content + at, size - at);
    const std::uint16_t sum = folded(total + rest);
    return static_cast<std::uint16_t>(sum << 8 | sum >> 8);
}

}  // namespace

std::size_t KeyHash::operator()(const Key& key) const {
    std::uint64_t hash = 0x9E3779B97F4A7C15ull;
    for (const End& end : key) {
        std::uint64_t words[2];
        std::memcpy(words, end.address.data(), 16);
        for (const std::uint64_t word : {words[0], words[1], std::uint64_t{end.port}}) {
            hash = (hash ^ word) * 0xFF51AFD7ED558CCDull;
            hash ^= hash >> 32;
        }
    }
    return static_cast<std::size_t>(hash);
}

Left tcp_segment(const std::uint8_t* frame, const IpPacket& packet, TcpSegment& segment) {
    const std::size_t at = packet.begin;
    if (packet.captured < at + 20) return packet.end >= at + 20 ? Left::short_frame : Left::damaged;
    const std::uint8_t* header = frame + at;
    const std::size_t begin = at + (header[12] >> 4) * 4u;
    if (begin < at + 20 || begin > packet.end) return Left::damaged;
    segment = {big16(header),      big16(header + 2), big32(header + 4), big32(header + 8), header[13], begin,
               packet.end, std::max(begin, packet.captured)};
    return Left::none;
}

bool is_changed(const std::uint8_t* frame, const IpPacket& packet) {
    const std::uint16_t given = big16(frame + packet.begin + kChecksumAt);
    if (packet.captured < packet.end || given == 0) return false;
    const std::size_t size = packet.end - packet.begin;
    const std::uint16_t ends = folded(std::uint64_t{words(packet.source, packet.address_bytes)} +
                                      words(packet.destination, packet.address_bytes) + kTcp);
    const std::uint16_t pseudo = folded(std::uint64_t{ends} + (size & 0xFFFF) + (size >> 16));
    // Left to the sender's network card, which had not seen the frame yet (Linux puts the sum of the pseudo-header).
    if (given == ends || given == pseudo) return false;
    return folded(std::uint64_t{pseudo} + words(frame + packet.begin, size)) != 0xFFFF;
}

void Streams::new_batch() {
    for (Half* half : touched_) {
        half->given.clear();
        half->released.clear();
    }
    touched_.clear();
    released_.clear();
}

void Streams::segment(const IpPacket& packet, const TcpSegment& segment, Bytes payload, std::uint64_t time_ns) {
    const auto [connection, side] = find(packet, segment);
    Half& half = connection->halves[static_cast<std::size_t>(side)];
    Half& other = connection->halves[static_cast<std::size_t>(1 - side)];
    if (segment.flags & kRst) {
        const bool near = !half.known || std::abs(half.position(segment.sequence) - half.next) < kFarthest;
        if (near || !segment.sequence) {
            close(connection);
        } else {
            count(Count::implausible_segments);
        }
        return;
    }
    const std::optional<std::int64_t> begin = place(half, other, segment);
    if (!begin) {
        count(Count::implausible_segments);
        return;
    }
    const auto size = static_cast<std::int64_t>(segment.end - segment.begin);
    if (size) {
        if (size <= 1 && *begin + size == half.next && half.acknowledged >= half.next) {
            count(Count::keep_alives);
        } else {
            take(half, *begin, payload, time_ns);
            bound(half, other);
        }
    }
    if (segment.flags & kFin && !half.fin) half.fin = *begin + size;
    if (segment.flags & kAck) acknowledged(other, segment.acknowledgement);
    const auto over = [](const Half& one) { return one.fin && one.next >= *one.fin; };
    if (over(half) && over(other)) close(connection);
}

void Streams::finish() {
    while (!connections_.empty()) close(connections_.begin());
}

// -- connections ------------------------------------------------------------------------------------------------------

std::pair<Streams::Connections::iterator, int> Streams::find(const IpPacket& packet, const TcpSegment& segment) {
    // Mostly it is the connection of the segment before, which is the last one of the list.
    if (!connections_.empty() && !(segment.flags & kSyn)) {
        const auto newest = std::prev(connections_.end());
        for (int side = 0; side < 2; ++side) {
            if (is_end(newest->key[static_cast<std::size_t>(side)], packet.source, packet.address_bytes,
                       segment.source_port) &&
                is_end(newest->key[static_cast<std::size_t>(1 - side)], packet.destination, packet.address_bytes,
                       segment.destination_port))
                return {newest, side};
        }
    }
    const End source = end_of(packet.source, packet.address_bytes, segment.source_port);
    const End destination = end_of(packet.destination, packet.address_bytes, segment.destination_port);
    const Key forward{source, destination}, backward{destination, source};
    int side = 0;
    auto found = by_key_.find(forward);
    if (found == by_key_.end()) {
        found = by_key_.find(backward);
        side = 1;
    }
    if (found != by_key_.end() && segment.flags & kSyn && is_new(*found->second, side, segment)) {
        count(Count::reused_ports);
        close(found->second);
        found = by_key_.end();
    }
    if (found != by_key_.end()) {
        connections_.splice(connections_.end(), connections_, found->second);
        return {found->second, side};
    }
    side = segment.flags & kSyn && segment.flags & kAck ? 1 : 0;
    if (connections_.size() >= settings_.max_connections && !connections_.empty()) {
        count(Count::given_up_connections);
        close(connections_.begin());
    }
    const auto made = connections_.emplace(connections_.end());
    made->key = side ? backward : forward;
    if (segment.flags & kSyn) made->opened_by = 0;
    by_key_[made->key] = made;
    count(Count::connections);
    opener_.open(*made);
    return {made, side};
}

bool Streams::is_new(const Connection& connection, int side, const TcpSegment& segment) {
    const Half& half = connection.halves[static_cast<std::size_t>(side)];
    const Half& other = connection.halves[static_cast<std::size_t>(1 - side)];
    if (half.first) return *half.first != segment.sequence;
    if (half.known) return half.position(segment.sequence + 1) != 0;
    if (!(segment.flags & kAck)) return true;
    // The answer to a SYN. To the one that is known?
    return !other.first || *other.first + 1 != segment.acknowledgement;
}

std::optional<std::int64_t> Streams::place(Half& half, Half& other, const TcpSegment& segment) {
    const bool syn = segment.flags & kSyn;
    const std::uint32_t sequence = segment.sequence + syn;
    if (!half.known) half.begin_at(sequence);
    half.seen = true;
    if (syn) {
        half.first = segment.sequence;
        if (segment.flags & kAck && !other.known) {  // the answer to a SYN that was not captured (yet)
            other.begin_at(segment.acknowledgement);
            other.first = segment.acknowledgement - 1;
        }
    }
    const std::int64_t begin = half.position(sequence);
    if (std::abs(begin - half.next) >= kFarthest) return std::nullopt;
    return begin;
}

void Streams::close(Connections::iterator connection) {
    by_key_.erase(connection->key);
    for (Half& half : connection->halves) {
        while (!half.stored.empty()) {
            skip(half, half.stored.begin()->first);
            hand_on_stored(half);
        }
        if (half.fin) skip(half, *half.fin);
        if (half.reader) half.reader->end();
        touched_.erase(&half);
        for (auto& memory : half.released) released_.push_back(std::move(memory));
    }
    connections_.erase(connection);
}

// -- bytes ------------------------------------------------------------------------------------------------------------

void Streams::take(Half& half, std::int64_t begin, Bytes payload, std::uint64_t time_ns) {
    const std::int64_t end = begin + static_cast<std::int64_t>(payload.size);
    if (begin < half.next) {
        const std::int64_t old = std::min(end, half.next) - begin;
        count(Count::repeated_bytes, static_cast<std::uint64_t>(old));
        compare(half, begin, {payload.data, static_cast<std::size_t>(old)});
        payload = payload.from(static_cast<std::size_t>(old));
        begin += old;
    }
    if (!payload.size) return;
    if (begin == half.next && (half.stored.empty() || end <= half.stored.begin()->first)) {
        hand_on(half, payload, time_ns);
        hand_on_stored(half);
    } else {
        store(half, begin, payload, time_ns);
        hand_on_stored(half);
    }
}

void Streams::hand_on(Half& half, Bytes content, std::uint64_t time_ns) {
    if (half.given.empty()) touched_.insert(&half);
    half.given.push_back({half.next, content});
    half.next += static_cast<std::int64_t>(content.size);
    if (half.reader) half.reader->data(content, time_ns);
}

void Streams::compare(const Half& half, std::int64_t begin, Bytes content) {
    const std::int64_t end = begin + static_cast<std::int64_t>(content.size);
    // Given stretches are in order: those before `begin` are passed over.
    auto given = std::upper_bound(half.given.begin(), half.given.end(), begin,
                                  [](std::int64_t at, const Half::Given& one) { return at < one.begin; });
    if (given != half.given.begin()) --given;
    for (; given != half.given.end() && given->begin < end; ++given) {
        const std::int64_t low = std::max(begin, given->begin);
        const std::int64_t high = std::min(end, given->begin + static_cast<std::int64_t>(given->content.size));
        if (low < high && std::memcmp(content.data + (low - begin), given->content.data + (low - given->begin),
                                      static_cast<std::size_t>(high - low)) != 0)
            count(Count::differing_copies);
    }
}

void Streams::store(Half& half, std::int64_t begin, Bytes content, std::uint64_t time_ns) {
    count(Count::out_of_order_segments);
    const std::int64_t end = begin + static_cast<std::int64_t>(content.size);
    auto known = half.stored.upper_bound(begin);
    if (known != half.stored.begin()) --known;
    std::int64_t position = begin;
    while (position < end) {
        while (known != half.stored.end() &&
               known->first + static_cast<std::int64_t>(known->second.content.size()) <= position)
            ++known;
        const bool any = known != half.stored.end();
        std::int64_t stop = any ? std::min(end, known->first) : end;
        if (position < stop) {
            const std::uint8_t* from = content.data + (position - begin);
            const auto size = static_cast<std::uint64_t>(stop - position);
            half.stored.emplace_hint(known, position, Half::Stored{{from, from + size}, time_ns});
            half.stored_bytes += size + kStoredBytes;
            stored_bytes_ += size + kStoredBytes;
        }
        if (any && stop < end) {
            const auto& content_known = known->second.content;
            const std::int64_t high = std::min(end, known->first + static_cast<std::int64_t>(content_known.size()));
            const std::int64_t low = std::max(position, known->first);
            count(Count::repeated_bytes, static_cast<std::uint64_t>(high - low));
            if (std::memcmp(content.data + (low - begin), content_known.data() + (low - known->first),
                            static_cast<std::size_t>(high - low)) != 0)
                count(Count::differing_copies);
            stop = high;
        }
        position = stop;
    }
}

void Streams::hand_on_stored(Half& half) {
    while (!half.stored.empty() && half.stored.begin()->first == half.next) {
        Half::Stored one = std::move(half.stored.begin()->second);
        half.stored.erase(half.stored.begin());
        half.stored_bytes -= one.content.size() + kStoredBytes;
        stored_bytes_ -= one.content.size() + kStoredBytes;
        half.released.push_back(std::move(one.content));
        const auto& kept = half.released.back();
        hand_on(half, {kept.data(), kept.size()}, one.time_ns);
    }
}

// -- holes ------------------------------------------------------------------------------------------------------------

void Streams::acknowledged(Half& half, std::uint32_t acknowledgement) {
    if (!half.seen) return;
    std::int64_t position = half.position(acknowledgement);
    if (half.fin && position == *half.fin + 1) position = *half.fin;
    if (position <= half.acknowledged || position - half.next >= kFarthest) return;
    half.acknowledged = position;
    while (half.next < position) {
        skip(half, half.stored.empty() ? position : std::min(position, half.stored.begin()->first));
        hand_on_stored(half);
    }
}

void Streams::skip(Half& half, std::int64_t position) {
    if (position <= half.next) return;
    const auto nbytes = static_cast<std::uint64_t>(position - half.next);
    half.next = position;
    count(Count::holes);
    count(Count::lost_bytes, nbytes);
    if (half.reader) half.reader->hole(nbytes);
}

void Streams::bound(Half& half, const Half& other) {
    while (!half.stored.empty() &&
           (half.stored_bytes > settings_.keep_bytes || stored_bytes_ > settings_.keep_all_bytes ||
            (!other.seen && half.stored_bytes > settings_.blind_bytes))) {
        if (other.seen) count(Count::not_waited_for);
        skip(half, half.stored.begin()->first);
        hand_on_stored(half);
    }
}

}  // namespace lastgood::mirror
