// Mirrored TCP connections to messages. src/lastgood/mirror/streams/sockets.py is the plain twin, and explains the rules.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "capture/frame.hpp"
#include "mirror/gather.hpp"
#include "mirror/tcp.hpp"

namespace lastgood::mirror {


struct OpenedFlow {
    std::uint32_t index;
    Key ends;
    int side;
    int connector;  // 1: this side opened the connection, 0: the other one, -1: not seen
    bool from_the_beginning;
};

struct Refused {
    Key ends;
    bool tls;
};

class Gather {
  public:
    std::uint32_t open(const Connection& connection, int side, int connector, bool from_the_beginning);
    void close(std::uint32_t flow) { tables.closed.push_back(flow); }
    void head(const Head& head) { tables.heads.push_back(head); }
    void piece(std::uint32_t flow, std::uint64_t message, std::uint64_t offset, Bytes content) {
        payload_bytes += content.size;
        tables.pieces.push_back(
            {flow, 0, message, offset, reinterpret_cast<std::uintptr_t>(content.data), content.size});
    }
    void lost(std::uint32_t flow, std::uint64_t message, std::uint64_t offset, std::uint64_t nbytes) {
        lost_payload_bytes += nbytes;
        tables.lost.push_back({flow, 0, message, offset, nbytes});
    }
    void resync(std::uint32_t flow, std::string why) {
        ++resynced;
        tables.resynced.emplace_back(flow, std::move(why));
    }
    // Memory that stays until the next batch.
    Bytes keep(std::vector<std::uint8_t> content) {
        kept_.push_back(std::move(content));
        return {kept_.back().data(), kept_.back().size()};
    }
    void new_batch() { kept_.clear(); }

    Tables tables;
    std::vector<OpenedFlow> opened;
    std::vector<Refused> refused;
    std::uint64_t flows = 0, payload_bytes = 0, lost_payload_bytes = 0, resynced = 0, strangers = 0,
                  predicted_headers = 0;

  private:
    std::vector<std::vector<std::uint8_t>> kept_;
};

enum class Verdict { mine, not_mine, more };

struct Beginning {
    const Half* half = nullptr;
    bool broken = false;  // a hole came
    int opener = -1;      // 1: this side opened the connection, 0: the other one, -1: not seen
    std::vector<std::uint8_t> content;
    std::uint64_t time_ns = 0;
    std::size_t searched = 0;
    std::uint64_t dropped = 0;

    // Whether `content` begins with the direction's first byte.
    bool first() const { return half->first && !broken; }
};

class Framing {
  public:
    virtual ~Framing() = default;
    virtual Verdict judge(std::array<Beginning, 2>& beginnings) = 0;
    virtual std::array<std::unique_ptr<Reader>, 2> readers(const Connection& connection,
                                                           const std::array<Beginning, 2>& beginnings,
                                                           Gather& gather) = 0;
};

class SocketParser : private Opener {
  public:
    SocketParser(std::unique_ptr<Framing> framing, const TcpSettings& settings);
    // The frames' bytes stay where they are until the next call.
    void feed(const std::uint8_t* data, std::size_t size, const Frame* frames, std::size_t count);
    void finish();
    Gather& gather() { return gather_; }
    std::map<std::string, std::uint64_t> counters() const;

  private:
    void open(Connection& connection) override;

    std::unique_ptr<Framing> framing_;
    Gather gather_;
    Streams streams_;
    std::uint64_t frames_ = 0, not_tcp_ = 0, cut_segments_ = 0;
    std::array<std::uint64_t, 7> left_{};
};

}  // namespace lastgood::mirror
