// RoCEv2 frames to messages. tests/mirror/support/plain/roce.py is the plain twin, and says what is done and why.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "capture/frame.hpp"
#include "mirror/gather.hpp"
#include "mirror/roce_flow.hpp"

namespace lastgood::mirror {

class RoceQueue;

// Two addresses (IPv4 in the first 4 bytes of 16) and a number: a queue pair, or a UDP source port.
struct RoceKey {
    std::array<std::uint64_t, 5> words{};
    bool operator==(const RoceKey& other) const { return words == other.words; }
};

struct RoceKeyHash {
    std::size_t operator()(const RoceKey& key) const {
        std::uint64_t mixed = 0;
        for (const std::uint64_t word : key.words) {
            mixed = (mixed ^ word) * 0x9E3779B97F4A7C15u;
            mixed ^= mixed >> 32;
        }
        return std::size_t(mixed);
    }
};

// A flow that was opened: one direction to one queue pair.
struct RoceOpened {
    std::string source, destination;  // 4 or 16 bytes
    std::uint16_t port;
    std::uint32_t queue;
    bool from_start;
};

struct RoceOutput {
    Tables tables;
    std::vector<RoceOpened> opened;
    std::uint32_t first_opened = 0;  // their numbers count on from here
};

class RoceParser {
  public:
    RoceParser(RoceProtocol protocol, std::size_t patience, std::size_t most_waiting_bytes, bool striped);
    ~RoceParser();
    RoceParser(const RoceParser&) = delete;
    RoceParser& operator=(const RoceParser&) = delete;

    // What it gives holds until the next call.
    const RoceOutput& feed(const std::uint8_t* data, std::size_t nbytes, const Frame* frames, std::size_t count);
    const RoceOutput& finish();
    std::uint64_t counter(RoceCount which) const { return counters_[std::size_t(which)]; }

  private:
    friend class RoceQueue;

    struct Packet;

    void begin();
    void frame(const std::uint8_t* data, const Frame& frame);
    void write(const RoceKey& key, Packet& packet);
    void acknowledge(const RoceKey& port_key, const Packet& packet);
    RoceQueue& add(const RoceKey& key, const Packet& packet);
    void close(RoceQueue& queue);
    std::uint8_t* room(std::size_t nbytes);
    void count(RoceCount which, std::uint64_t more = 1) { counters_[std::size_t(which)] += more; }

    const RoceProtocol protocol_;
    const std::size_t patience_, most_waiting_bytes_;
    const bool striped_;
    std::unordered_map<RoceKey, std::unique_ptr<RoceQueue>, RoceKeyHash> queues_;
    std::unordered_map<RoceKey, std::vector<RoceQueue*>, RoceKeyHash> by_port_;
    std::uint64_t tick_ = 0;
    std::array<std::uint64_t, std::size_t(RoceCount::end)> counters_{};
    std::uint32_t flows_ = 0;
    std::uint64_t waiting_bytes_ = 0;
    RoceOutput output_;
    std::vector<std::shared_ptr<std::uint8_t[]>> alive_;
    std::vector<std::unique_ptr<std::uint8_t[]>> blocks_;  // of decoded data
    std::size_t block_ = 0, block_used_ = 0;
};

}  // namespace lastgood::mirror
