#include "mirror/sockets.hpp"

#include <algorithm>

namespace lastgood::mirror {
namespace {

constexpr std::size_t kKeptBytes = 4096;
constexpr std::size_t kKeptMiddleBytes = std::size_t{2} << 20;
constexpr std::size_t kAhead = 4;
constexpr std::uint64_t kSearchedBytes = std::uint64_t{1024} << 20;
constexpr const char* kCountNames[] = {
    "repeated_bytes", "differing_copies", "keep_alives", "implausible_segments", "reused_ports",
    "given_up_connections", "connections", "out_of_order_segments", "holes", "lost_bytes", "not_waited_for"};
constexpr const char* kLeftNames[] = {"", "short_frames", "unknown_links", "not_ip", "fragments", "damaged_headers",
                                      "wrong_checksums"};

class Nobody : public Reader {
  public:
    void data(Bytes, std::uint64_t) override {}
    void hole(std::uint64_t) override {}
    void end() override {}
};

// Keeps the beginning of a connection until it is known what it is, then its readers.
class Sniffer : public Owner {
  public:
    Sniffer(Connection& connection, Framing& framing, Gather& gather)
        : connection_(connection), framing_(framing), gather_(gather), sides_{Side(*this, 0), Side(*this, 1)} {
        for (int side = 0; side < 2; ++side) {
            Beginning& beginning = beginnings_[static_cast<std::size_t>(side)];
            beginning.half = &connection.halves[static_cast<std::size_t>(side)];
            beginning.opener = connection.opened_by ? *connection.opened_by == side : -1;
            connection.halves[static_cast<std::size_t>(side)].reader = &sides_[static_cast<std::size_t>(side)];
        }
    }

  private:
    class Side : public Reader {
      public:
        Side(Sniffer& sniffer, std::size_t side) : sniffer_(sniffer), side_(side) {}
        void data(Bytes content, std::uint64_t time_ns) override { sniffer_.data(side_, content, time_ns); }
        void hole(std::uint64_t nbytes) override {
            Beginning& mine = sniffer_.beginnings_[side_];
            mine.broken = true;
            mine.dropped += mine.content.size() + nbytes;
            mine.content.clear();
            mine.searched = 0;
        }
        void end() override {}

      private:
        Sniffer& sniffer_;
        std::size_t side_;
    };

    void data(std::size_t side, Bytes content, std::uint64_t time_ns) {
        Beginning& mine = beginnings_[side];
        mine.content.insert(mine.content.end(), content.data, content.data + content.size);
        mine.time_ns = time_ns;
        judge();
        const std::size_t most = mine.first() ? kKeptBytes : kKeptMiddleBytes;
        if (decided_ || mine.content.size() <= 2 * most) return;
        if (mine.first()) {
            leave(false);
            return;
        }
        const std::size_t drop = mine.content.size() - most;
        mine.content.erase(mine.content.begin(), mine.content.begin() + static_cast<std::ptrdiff_t>(drop));
        mine.searched = mine.searched > drop ? mine.searched - drop : 0;
        mine.dropped += drop;
        if (mine.dropped > kSearchedBytes) leave(false);
    }

    void judge() {
        if (!strange_) {
            const Verdict verdict = framing_.judge(beginnings_);
            if (verdict == Verdict::mine) {
                begin();
                return;
            }
            strange_ = verdict == Verdict::not_mine;
        }
        for (const Beginning& one : beginnings_) {
            if (one.first() && one.opener == 1 && one.content.size() >= 2 && one.content[0] == 0x16 &&
                one.content[1] == 0x03) {
                leave(true);
                return;
            }
        }
        if (strange_) leave(false);
    }

    void begin() {
        decided_ = true;
        readers_ = framing_.readers(connection_, beginnings_, gather_);
        for (std::size_t side = 0; side < 2; ++side) {
            Beginning& kept = beginnings_[side];
            connection_.halves[side].reader = readers_[side].get();
            if (!kept.content.empty()) readers_[side]->data(gather_.keep(std::move(kept.content)), kept.time_ns);
            kept.content = {};
        }
    }

    void leave(bool tls) {
        decided_ = true;
        for (std::size_t side = 0; side < 2; ++side) {
            connection_.halves[side].reader = &nobody_;
            beginnings_[side].content = {};
        }
        ++gather_.strangers;
        gather_.refused.push_back({connection_.key, tls});
    }

    Connection& connection_;
    Framing& framing_;
    Gather& gather_;
    std::array<Beginning, 2> beginnings_;
    std::array<Side, 2> sides_;
    std::array<std::unique_ptr<Reader>, 2> readers_;
    Nobody nobody_;
    bool decided_ = false, strange_ = false;
};

}  // namespace

std::uint32_t Gather::open(const Connection& connection, int side, int connector, bool from_the_beginning) {
    const auto index = static_cast<std::uint32_t>(flows++);
    opened.push_back({index, connection.key, side, connector, from_the_beginning});
    return index;
}

SocketParser::SocketParser(std::unique_ptr<Framing> framing, const TcpSettings& settings)
    : framing_(std::move(framing)), streams_(*this, settings) {}

void SocketParser::feed(const std::uint8_t* data, std::size_t size, const Frame* frames, std::size_t count) {
    streams_.new_batch();
    gather_.new_batch();
    for (const Frame* frame = frames; frame != frames + count; ++frame) {
        ++frames_;
        // Each header is a miss of the cache: the next ones are asked for early.
        if (frame + kAhead < frames + count && frame[kAhead].offset < size)
            __builtin_prefetch(data + frame[kAhead].offset);
        if (frame->offset > size || frame->captured > size - frame->offset) {
            ++left_[static_cast<std::size_t>(Left::damaged)];
            continue;
        }
        const std::uint8_t* content = data + frame->offset;
        const std::size_t length = std::max<std::size_t>(frame->length, frame->captured);
        IpPacket packet;
        Left left = ip_packet(content, frame->captured, length, frame->link, packet);
        if (left != Left::none) {
            ++left_[static_cast<std::size_t>(left)];
            continue;
        }
        if (packet.protocol != kTcp) {
            ++not_tcp_;
            continue;
        }
        TcpSegment segment;
        left = tcp_segment(content, packet, segment);
        if (left != Left::none) {
            ++left_[static_cast<std::size_t>(left)];
            continue;
        }
        if (!(frame->flags & frame_no_checksum) && is_changed(content, packet)) {
            ++left_[static_cast<std::size_t>(Left::wrong_checksum)];
            continue;
        }
        if (segment.captured < segment.end) ++cut_segments_;
        streams_.segment(packet, segment, {content + segment.begin, segment.captured - segment.begin},
                         frame->time_ns);
    }
}

void SocketParser::finish() {
    streams_.new_batch();
    gather_.new_batch();
    streams_.finish();
}

std::map<std::string, std::uint64_t> SocketParser::counters() const {
    std::map<std::string, std::uint64_t> found{{"frames", frames_},
                                               {"not_tcp", not_tcp_},
                                               {"cut_segments", cut_segments_},
                                               {"flows", gather_.flows},
                                               {"payload_bytes", gather_.payload_bytes},
                                               {"lost_payload_bytes", gather_.lost_payload_bytes},
                                               {"resynced", gather_.resynced},
                                               {"strangers", gather_.strangers},
                                               {"predicted_headers", gather_.predicted_headers}};
    for (std::size_t at = 1; at < left_.size(); ++at) found[kLeftNames[at]] += left_[at];
    for (std::size_t at = 0; at < streams_.counts().size(); ++at) found[kCountNames[at]] += streams_.counts()[at];
    for (auto one = found.begin(); one != found.end();) one = one->second ? std::next(one) : found.erase(one);
    return found;
}

void SocketParser::open(Connection& connection) {
    connection.owner = std::make_unique<Sniffer>(connection, *framing_, gather_);
}

}  // namespace lastgood::mirror
