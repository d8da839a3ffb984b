// TCP reassembly of mirrored connections. src/lastgood/mirror/streams/tcp.py is the plain twin, and explains the rules.
#pragma once

#include <array>
#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "mirror/ip.hpp"

namespace lastgood::mirror {

struct Bytes {
    const std::uint8_t* data;
    std::size_t size;
    Bytes from(std::size_t offset) const { return {data + offset, size - offset}; }
};

struct TcpSettings {
    std::uint64_t keep_bytes, keep_all_bytes, blind_bytes, max_connections;
};

struct TcpSegment {
    std::uint16_t source_port, destination_port;
    std::uint32_t sequence, acknowledgement;
    std::uint8_t flags;
    std::size_t begin, end, captured;
};

Left tcp_segment(const std::uint8_t* frame, const IpPacket& packet, TcpSegment& segment);

// Whether the checksum of a segment that is there to its end says that it was changed on the way.
bool is_changed(const std::uint8_t* frame, const IpPacket& packet);

class Reader {
  public:
    virtual ~Reader() = default;
    virtual void data(Bytes content, std::uint64_t time_ns) = 0;
    virtual void hole(std::uint64_t nbytes) = 0;
    virtual void end() = 0;
};

struct Half {
    struct Stored {
        std::vector<std::uint8_t> content;
        std::uint64_t time_ns;
    };
    struct Given {
        std::int64_t begin;
        Bytes content;
    };
    Reader* reader = nullptr;
    bool seen = false;   // a frame of this direction was captured
    bool known = false;  // its sequence numbers are known
    std::int64_t next = 0;
    std::int64_t acknowledged = 0;
    std::optional<std::uint32_t> first;
    std::optional<std::int64_t> fin;
    std::map<std::int64_t, Stored> stored;
    std::uint64_t stored_bytes = 0;
    std::vector<Given> given;
    std::vector<std::vector<std::uint8_t>> released;  // memory of `given` that was stored
    std::uint32_t base = 0;

    void begin_at(std::uint32_t sequence) {
        base = sequence;
        next = acknowledged = 0;
        known = true;
    }
    std::int64_t position(std::uint32_t sequence) const {
        const auto ahead = static_cast<std::uint32_t>(sequence - base - static_cast<std::uint32_t>(next));
        return next + static_cast<std::int32_t>(ahead);
    }
};

struct End {
    std::array<std::uint8_t, 16> address{};
    std::uint8_t address_bytes = 0;
    std::uint16_t port = 0;
    bool operator==(const End& other) const {
        return port == other.port && address_bytes == other.address_bytes && address == other.address;
    }
};

using Key = std::array<End, 2>;

struct KeyHash {
    std::size_t operator()(const Key& key) const;
};

// What a connection's readers belong to; it lives as long as the connection.
class Owner {
  public:
    virtual ~Owner() = default;
};

struct Connection {
    Key key;
    std::array<Half, 2> halves;
    std::optional<int> opened_by;
    std::unique_ptr<Owner> owner;
};

class Opener {
  public:
    virtual ~Opener() = default;
    virtual void open(Connection& connection) = 0;
};

enum class Count : std::size_t {
    repeated_bytes, differing_copies, keep_alives, implausible_segments, reused_ports, given_up_connections,
    connections, out_of_order_segments, holes, lost_bytes, not_waited_for, size
};

class Streams {
  public:
    Streams(Opener& opener, const TcpSettings& settings) : settings_(settings), opener_(opener) {}
    void new_batch();
    void segment(const IpPacket& packet, const TcpSegment& segment, Bytes payload, std::uint64_t time_ns);
    void finish();
    const std::array<std::uint64_t, static_cast<std::size_t>(Count::size)>& counts() const { return counts_; }

  private:
    using Connections = std::list<Connection>;

    void count(Count which, std::uint64_t by = 1) { counts_[static_cast<std::size_t>(which)] += by; }
    std::pair<Connections::iterator, int> find(const IpPacket& packet, const TcpSegment& segment);
    static bool is_new(const Connection& connection, int side, const TcpSegment& segment);
    static std::optional<std::int64_t> place(Half& half, Half& other, const TcpSegment& segment);
    void close(Connections::iterator connection);
    void take(Half& half, std::int64_t begin, Bytes payload, std::uint64_t time_ns);
    void hand_on(Half& half, Bytes content, std::uint64_t time_ns);
    void compare(const Half& half, std::int64_t begin, Bytes content);
    void store(Half& half, std::int64_t begin, Bytes content, std::uint64_t time_ns);
    void hand_on_stored(Half& half);
    void acknowledged(Half& half, std::uint32_t acknowledgement);
    void skip(Half& half, std::int64_t position);
    void bound(Half& half, const Half& other);

    const TcpSettings settings_;
    Opener& opener_;
    std::array<std::uint64_t, static_cast<std::size_t>(Count::size)> counts_{};
    Connections connections_;  // the one that was silent for longest first
    std::unordered_map<Key, Connections::iterator, KeyHash> by_key_;
    std::uint64_t stored_bytes_ = 0;
    std::unordered_set<Half*> touched_;
    std::vector<std::vector<std::uint8_t>> released_;  // of connections that were closed in this batch
};

}  // namespace lastgood::mirror
