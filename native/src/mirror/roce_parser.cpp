#include "mirror/roce_parser.hpp"

#include <algorithm>
#include <cstring>
#include <deque>
#include <map>

#include "mirror/icrc.hpp"
#include "mirror/ip.hpp"

namespace lastgood::mirror {
namespace {

constexpr std::uint16_t kRocePort = 4791;
constexpr std::uint8_t kAcknowledge = 17, kCm = 100, kCnp = 129;
constexpr std::int64_t kPsns = 1 << 24;
constexpr std::uint32_t kStartWindow = 1024;
constexpr std::int64_t kMostAhead = 1 << 16;
constexpr std::size_t kRememberedStarts = 256, kRememberedGaps = 64, kMostFlows = 1024, kMostEarly = 64;
constexpr std::size_t kBlockBytes = 1 << 20, kKeptBlocks = 64;
constexpr std::size_t kIcrcBytes = 4;
constexpr std::uint32_t kData = 1;

std::uint32_t big24(const std::uint8_t* at) {
    return std::uint32_t(at[0]) << 16 | std::uint32_t(at[1]) << 8 | at[2];
}

std::uint64_t big64(const std::uint8_t* at) { return std::uint64_t(big32(at)) << 32 | big32(at + 4); }

bool has_address(std::uint8_t opcode) { return opcode == kFirst || opcode == kOnly || opcode == kOnlyImmediate; }

bool has_immediate(std::uint8_t opcode) { return opcode == kLastImmediate || opcode == kOnlyImmediate; }

RoceKey make_key(const std::uint8_t* source, const std::uint8_t* destination, std::size_t address_bytes,
                 std::uint32_t number) {
    RoceKey key;
    std::memcpy(&key.words[0], source, address_bytes);
    std::memcpy(&key.words[2], destination, address_bytes);
    key.words[4] = std::uint64_t(address_bytes) << 32 | number;
    return key;
}

std::string address_in(const RoceKey& key, std::size_t word) {
    return std::string(reinterpret_cast<const char*>(&key.words[word]), std::size_t(key.words[4] >> 32));
}

}  // namespace

struct RoceParser::Packet {
    RoceWrite write;
    std::uint32_t queue = 0, psn = 0;
    std::uint16_t port = 0;
    std::uint8_t syndrome = 0;
};

// One queue pair's packets in order, and the sink of its flow.
class RoceQueue final : public RoceSink {
  public:
    RoceQueue(RoceParser& parser, const RoceKey& key, const RoceParser::Packet& packet)
        : parser_(parser), key_(key), queue_(packet.queue), port_(packet.port), flow_(*this, parser.protocol_, packet.psn < kStartWindow, parser.striped_) {
        top_ = flow_.from_start() ? packet.psn : packet.psn + kPsns;
        floor_ = flow_.from_start() ? 0 : top_;
    }

    std::int64_t absolute(std::uint32_t psn) const {
        std::int64_t delta = (std::int64_t(psn) - top_ + kPsns / 2) % kPsns;
        if (delta < 0) delta += kPsns;
        return top_ + delta - kPsns / 2;
    }

    void remember(std::int64_t psn, const RoceWrite& write) {
        starts_[psn] = {write.address, write.rkey, write.length};
        start_order_.push_back(psn);
        if (start_order_.size() > kRememberedStarts) {
            starts_.erase(start_order_.front());
            start_order_.pop_front();
        }
    }

    bool is_new_connection(std::int64_t psn, const RoceWrite& write) const {
        if (was_lost(psn)) return false;
        const auto found = starts_.find(psn);
        return found == starts_.end() || found->second.address != write.address || found->second.rkey != write.rkey ||
               found->second.length != write.length;
    }

    bool was_lost(std::int64_t psn) const {
        for (const auto& gap : gaps_)
            if (gap.first <= psn && psn <= gap.second) return true;
        return false;
    }

    RoceKey port_key() const {
        RoceKey key = key_;
        key.words[4] = (key.words[4] & ~std::uint64_t(0xFFFFFFFF)) | port_;
        return key;
    }

    bool holds(std::int64_t psn) const { return !held_.empty() && held_.count(psn) != 0; }

    void hold(const RoceWrite& write) {
        RoceWrite& kept = held_[write.psn];
        kept = write;
        kept.own.reset(new std::uint8_t[write.nbytes + 1]);
        if (write.nbytes) std::memcpy(kept.own.get(), write.data, write.nbytes);
        kept.data = kept.own.get();
        parser_.waiting_bytes_ += write.nbytes + kPacketBytes;
        parser_.count(RoceCount::held_packets);
    }

    void take(const RoceWrite& write) {
        ++floor_;
        flow_.take(write);
        drain();
    }

    void drain() {
        while (!held_.empty() && held_.begin()->first == floor_) {
            const RoceWrite write = std::move(held_.begin()->second);
            held_.erase(held_.begin());
            parser_.waiting_bytes_ -= write.nbytes + kPacketBytes;
            ++floor_;
            flow_.take(write);
        }
    }

    void settle(std::int64_t upto) {
        drain();
        while (floor_ <= upto) {
            const std::int64_t last = std::min(held_.empty() ? upto : held_.begin()->first - 1, upto);
            gaps_.emplace_back(floor_, last);
            if (gaps_.size() > kRememberedGaps) gaps_.pop_front();
            flow_.lose(floor_, last);
            floor_ = last + 1;
            top_ = std::max(top_, floor_);
            drain();
        }
    }

    void head(std::uint64_t message, std::uint64_t nbytes, std::uint64_t time_ns) override {
        if (!opened_) {
            opened_ = true;
            index_ = parser_.flows_++;
            parser_.output_.opened.push_back({address_in(key_, 0), address_in(key_, 2), port_, queue_, flow_.from_start()});
            parser_.count(RoceCount::flows);
            for (const Early& early : early_) {
                if (early.why.empty())
                    lost(early.message, early.offset, early.nbytes);
                else
                    resynced(early.why);
            }
            early_.clear();
        }
        parser_.count(RoceCount::messages);
        parser_.output_.tables.heads.push_back({index_, kData, message, 0, nbytes, time_ns});
    }

    void piece(std::uint64_t message, std::uint64_t offset, const RoceWrite& write, Coding coding) override {
        const std::uint8_t* at = write.data;
        std::size_t nbytes = write.nbytes;
        if (coding == Coding::raw) {
            if (write.own) parser_.alive_.push_back(write.own);
        } else {
            nbytes = data_bytes(coding, write.nbytes);
            std::uint8_t* const to = parser_.room(nbytes);
            decode_lines(coding, write.data, write.nbytes, to);
            at = to;
        }
        parser_.count(RoceCount::payload_bytes, nbytes);
        parser_.output_.tables.pieces.push_back(
            {index_, 0, message, offset, reinterpret_cast<std::uintptr_t>(at), nbytes});
    }

    void lost(std::uint64_t message, std::uint64_t offset, std::uint64_t nbytes) override {
        if (!opened_) {
            if (early_.size() < kMostEarly) early_.push_back({message, offset, nbytes, ""});
            return;
        }
        parser_.count(nbytes ? RoceCount::lost_bytes : RoceCount::lost_messages, nbytes ? nbytes : 1);
        parser_.output_.tables.lost.push_back({index_, 0, message, offset, nbytes});
    }

    void resynced(const std::string& why) override {
        if (!opened_) {
            if (early_.size() < kMostEarly) early_.push_back({0, 0, 0, why});
            return;
        }
        parser_.count(RoceCount::resynced);
        parser_.output_.tables.resynced.emplace_back(index_, why);
    }

    bool wait(std::int64_t more) override {
        if (more > 0 && parser_.waiting_bytes_ + std::uint64_t(more) > parser_.most_waiting_bytes_) return false;
        parser_.waiting_bytes_ += std::uint64_t(more);
        return true;
    }

    void count(RoceCount which, std::uint64_t more) override { parser_.count(which, more); }

  private:
    friend class RoceParser;
    struct Start {
        std::uint64_t address;
        std::uint32_t rkey, length;
    };
    struct Early {
        std::uint64_t message, offset, nbytes;
        std::string why;
    };

    RoceParser& parser_;
    const RoceKey key_;
    const std::uint32_t queue_;
    const std::uint16_t port_;
    std::int64_t top_ = 0, floor_ = 0;
    bool opened_ = false;
    std::uint32_t index_ = 0;
    bool acknowledged_ = false;
    std::uint64_t used_ = 0;  // tick of the last write
    std::map<std::int64_t, RoceWrite> held_;
    std::unordered_map<std::int64_t, Start> starts_;
    std::deque<std::int64_t> start_order_;
    std::deque<std::pair<std::int64_t, std::int64_t>> gaps_;
    std::vector<Early> early_;
    RoceFlow flow_;
};

RoceParser::RoceParser(RoceProtocol protocol, std::size_t patience, std::size_t most_waiting_bytes, bool striped)
    : protocol_(protocol), patience_(patience), most_waiting_bytes_(most_waiting_bytes), striped_(striped) {}

RoceParser::~RoceParser() = default;

void RoceParser::begin() {
    Tables& tables = output_.tables;
    tables.closed.clear();
    tables.heads.clear();
    tables.pieces.clear();
    tables.lost.clear();
    tables.resynced.clear();
    output_.opened.clear();
    output_.first_opened = flows_;
    alive_.clear();
    if (blocks_.size() > kKeptBlocks) blocks_.resize(kKeptBlocks);
    block_ = block_used_ = 0;
}

std::uint8_t* RoceParser::room(std::size_t nbytes) {
    // No packet is larger than a block.
    if (block_ < blocks_.size() && block_used_ + nbytes > kBlockBytes) {
        ++block_;
        block_used_ = 0;
    }
    if (block_ >= blocks_.size()) {
        blocks_.emplace_back(new std::uint8_t[kBlockBytes]);
        block_used_ = 0;
    }
    std::uint8_t* const at = blocks_[block_].get() + block_used_;
    block_used_ += nbytes;
    return at;
}

const RoceOutput& RoceParser::feed(const std::uint8_t* data, std::size_t nbytes, const Frame* frames,
                                   std::size_t count) {
    begin();
    for (std::size_t number = 0; number < count; ++number) {
        const Frame& one = frames[number];
        if (one.offset > nbytes || one.captured > nbytes - one.offset) continue;  // no frame of this batch
        frame(data + one.offset, one);
    }
    return output_;
}

const RoceOutput& RoceParser::finish() {
    begin();
    std::vector<RoceQueue*> queues;
    for (const auto& entry : queues_) queues.push_back(entry.second.get());
    std::sort(queues.begin(), queues.end(),
              [](const RoceQueue* left, const RoceQueue* right) { return left->used_ < right->used_; });
    for (RoceQueue* queue : queues) {
        queue->settle(queue->top_ - 1);
        queue->flow_.finish();
    }
    return output_;
}

void RoceParser::frame(const std::uint8_t* data, const Frame& frame) {
    count(RoceCount::frames);
    IpPacket ip{};
    switch (ip_packet(data, frame.captured, frame.length, frame.link, ip)) {
        case Left::none: break;
        case Left::short_frame: return count(RoceCount::short_frames);
        case Left::link: return count(RoceCount::unknown_links);
        case Left::not_ip: return count(RoceCount::not_ip);
        case Left::fragment: return count(RoceCount::fragments);
        case Left::damaged: return count(RoceCount::damaged_headers);
        case Left::wrong_checksum: break;  // `ip_packet` does not look at what it carries
    }
    if (ip.protocol != kUdp) return count(RoceCount::other_traffic);
    const std::size_t udp = ip.begin;
    if (ip.end - udp < 8) return count(RoceCount::damaged_headers);
    if (ip.captured < udp + 8) return count(RoceCount::short_frames);
    if (big16(data + udp + 2) != kRocePort) return count(RoceCount::other_traffic);
    const std::size_t nbytes = big16(data + udp + 4);
    std::size_t end = udp + nbytes;
    if (end > ip.end || nbytes < 8 + 12 + kIcrcBytes) return count(RoceCount::damaged_headers);
    if (end > ip.captured) return count(RoceCount::truncated_packets);
    end -= kIcrcBytes;
    const std::uint32_t sent = std::uint32_t(data[end]) | std::uint32_t(data[end + 1]) << 8 |
                               std::uint32_t(data[end + 2]) << 16 | std::uint32_t(data[end + 3]) << 24;
    const std::size_t start = std::size_t(ip.source - data) - (ip.address_bytes == 4 ? 12 : 8);  // of the IP header
    if (icrc(data + start, end - start, udp - start) != sent) return count(RoceCount::wrong_checksums);
    const std::uint8_t* const bth = data + udp + 8;
    const std::uint8_t opcode = bth[0];
    Packet packet;
    packet.queue = big24(bth + 5);
    packet.psn = big24(bth + 9);
    packet.port = big16(data + udp);
    if ((bth[1] & 0x0F) != 0) return count(RoceCount::strangers);
    if (opcode == kCnp) return count(RoceCount::congestion_notices);
    if (opcode == kCm && packet.queue == 1) return count(RoceCount::connection_datagrams);
    const bool is_write = kFirst <= opcode && opcode <= kOnlyImmediate;
    if (!is_write && opcode != kAcknowledge) return count(RoceCount::strangers);
    std::size_t begin = udp + 20;
    const std::size_t pad = bth[1] >> 4 & 3;
    const std::size_t need =
        (has_address(opcode) ? 16 : 0) + (has_immediate(opcode) ? 4 : 0) + (opcode == kAcknowledge ? 4 : 0);
    if (end - begin < need + pad) return count(RoceCount::damaged_headers);
    RoceWrite& write_ = packet.write;
    write_.opcode = opcode;
    if (has_address(opcode)) {
        write_.address = big64(data + begin);
        write_.rkey = big32(data + begin + 8);
        write_.length = big32(data + begin + 12);
        begin += 16;
    }
    if (has_immediate(opcode)) {
        std::memcpy(write_.immediate, data + begin, 4);
        begin += 4;
    }
    if (opcode == kAcknowledge) {
        packet.syndrome = data[begin];
        acknowledge(make_key(ip.destination, ip.source, ip.address_bytes, packet.port), packet);
        return;
    }
    write_.data = data + begin;
    write_.nbytes = end - pad - begin;
    write_.time_ns = frame.time_ns;
    write(make_key(ip.source, ip.destination, ip.address_bytes, packet.queue), packet);
}

void RoceParser::write(const RoceKey& key, Packet& packet) {
    count(RoceCount::writes);
    const auto found = queues_.find(key);
    RoceQueue* queue = found == queues_.end() ? &add(key, packet) : found->second.get();
    RoceWrite& write = packet.write;
    write.psn = queue->absolute(packet.psn);
    if (write.psn < queue->floor_) {
        if (!has_address(write.opcode) || !queue->is_new_connection(write.psn, write)) {
            count(queue->was_lost(write.psn) ? RoceCount::late_packets : RoceCount::repeated_packets);
            return;
        }
        count(RoceCount::reused_queue_pairs);
        close(*queue);
        queue = &add(key, packet);
        write.psn = queue->absolute(packet.psn);
    } else if (queue->holds(write.psn)) {
        count(RoceCount::repeated_packets);
        return;
    }
    queue->used_ = ++tick_;
    if (has_address(write.opcode)) queue->remember(write.psn, write);
    queue->top_ = std::max(queue->top_, write.psn + 1);
    if (write.psn == queue->floor_) {
        queue->take(write);
        return;
    }
    queue->hold(write);
    if (!queue->acknowledged_ && queue->held_.size() > patience_) queue->settle(queue->held_.begin()->first - 1);
    if (waiting_bytes_ > most_waiting_bytes_) {
        count(RoceCount::holes_given_up);
        queue->settle(queue->top_ - 1);
    }
}

void RoceParser::acknowledge(const RoceKey& port_key, const Packet& packet) {
    count(RoceCount::acknowledgements);
    const bool negative = (packet.syndrome >> 5 & 3) != 0;
    if (negative) count(RoceCount::negative_acknowledgements);
    const auto found = by_port_.find(port_key);
    if (found == by_port_.end() || found->second.size() != 1) return count(RoceCount::unpaired_acknowledgements);
    RoceQueue& queue = *found->second.front();
    const std::int64_t psn = queue.absolute(packet.psn) - (negative ? 1 : 0);
    if (psn < queue.floor_) return;
    if (psn - queue.top_ >= kMostAhead) return count(RoceCount::odd_packets);
    queue.acknowledged_ = true;
    queue.settle(psn);
}

RoceQueue& RoceParser::add(const RoceKey& key, const Packet& packet) {
    while (queues_.size() >= kMostFlows) {
        const auto oldest = std::min_element(queues_.begin(), queues_.end(), [](const auto& left, const auto& right) {
            return left.second->used_ < right.second->used_;
        });
        close(*oldest->second);
    }
    auto queue = std::make_unique<RoceQueue>(*this, key, packet);
    RoceQueue& added = *queue;
    added.used_ = ++tick_;
    queues_[key] = std::move(queue);
    by_port_[added.port_key()].push_back(&added);
    return added;
}

void RoceParser::close(RoceQueue& queue) {
    queue.settle(queue.top_ - 1);
    queue.flow_.finish();
    if (queue.opened_) output_.tables.closed.push_back(queue.index_);
    const auto port = by_port_.find(queue.port_key());
    port->second.erase(std::find(port->second.begin(), port->second.end(), &queue));
    if (port->second.empty()) by_port_.erase(port);
    const RoceKey key = queue.key_;
    queues_.erase(key);
}

}  // namespace lastgood::mirror
