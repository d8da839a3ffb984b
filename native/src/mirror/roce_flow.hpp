// The writes of one RoCE queue pair, in one direction, as messages. tests/mirror/support/plain/roce_flow.py is the
// plain twin, and says what is done and why; both are held to the same results by a test.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace lastgood::mirror {

enum : std::uint8_t { kFirst = 6, kMiddle = 7, kLast = 8, kLastImmediate = 9, kOnly = 10, kOnlyImmediate = 11 };

constexpr std::uint64_t kPacketBytes = 128;  // what a packet that waits takes beside its payload

enum class RoceProtocol { automatic, simple, ll, ll128 };
enum class Coding : std::uint8_t { raw, ll, ll128 };

// One packet of an RDMA write. What an opcode does not carry is 0.
struct RoceWrite {
    std::uint8_t opcode = 0;
    std::uint8_t immediate[4] = {};
    std::uint32_t rkey = 0, length = 0;
    std::int64_t psn = 0;
    std::uint64_t address = 0, time_ns = 0;
    const std::uint8_t* data = nullptr;
    std::size_t nbytes = 0;
    std::shared_ptr<std::uint8_t[]> own;  // if the payload is not in the batch any more

    bool only_immediate() const { return opcode == kOnlyImmediate && nbytes == 0 && address == 0 && rkey == 0; }
};

enum class RoceCount {
    frames,
    short_frames,
    unknown_links,
    not_ip,
    fragments,
    damaged_headers,
    other_traffic,
    truncated_packets,
    wrong_checksums,
    strangers,
    congestion_notices,
    connection_datagrams,
    writes,
    acknowledgements,
    negative_acknowledgements,
    unpaired_acknowledgements,
    repeated_packets,
    late_packets,
    held_packets,
    holes_given_up,
    reused_queue_pairs,
    odd_packets,
    lost_packets,
    cut_messages,
    wrong_flags,
    immediates,
    unplaced_packets,
    clear_to_send,
    packets_before_start,
    flows,
    messages,
    payload_bytes,
    lost_bytes,
    lost_messages,
    resynced,
    end
};

const char* roce_count_name(RoceCount which);

// Takes what a flow gives. Offsets and lengths are of data, without flags.
class RoceSink {
  public:
    virtual ~RoceSink() = default;
    virtual void head(std::uint64_t message, std::uint64_t nbytes, std::uint64_t time_ns) = 0;
    // Payload is still coded; its flags are right.
    virtual void piece(std::uint64_t message, std::uint64_t offset, const RoceWrite& write, Coding coding) = 0;
    virtual void lost(std::uint64_t message, std::uint64_t offset, std::uint64_t nbytes) = 0;
    virtual void resynced(const std::string& why) = 0;
    // Whether so many more bytes may wait with those of all flows; below 0: they wait no more.
    virtual bool wait(std::int64_t more) = 0;
    virtual void count(RoceCount which, std::uint64_t more) = 0;
};

class RoceFlow {
  public:
    // `striped`: other queue pairs carry other messages, or parts of each.
    RoceFlow(RoceSink& sink, RoceProtocol protocol, bool from_start, bool striped);

    void take(const RoceWrite& write);
    void lose(std::int64_t first, std::int64_t last);
    void finish();
    bool from_start() const { return from_start_; }

  private:
    void take_next(const RoceWrite& write);
    void begin(const RoceWrite& write);
    void go_on(const RoceWrite& write);
    void open(std::uint64_t size, std::int64_t first, const RoceWrite& sample);
    void end();
    void cut(std::int64_t psn);
    void piece(std::uint64_t offset, const RoceWrite& write);
    void lost(std::uint64_t offset, std::uint64_t nbytes);
    std::uint64_t packets(std::uint64_t size) const;
    void immediate(const RoceWrite& write);
    bool continues_split(const RoceWrite& write) const;
    void wait(std::vector<RoceWrite>& where, const RoceWrite& write);
    void release();
    void end_split();
    void split_unknown();
    void drop_split();
    void give_split(const RoceWrite& write);
    void split_message(std::uint64_t size);
    bool after_gap(const RoceWrite& write);
    void drop_tail();
    void ends_in_gap(const RoceWrite& write);
    void give_tail(const std::uint8_t* immediate);
    void count_missing(std::int64_t start, const RoceWrite* write);
    std::vector<std::uint64_t> stated(const std::uint8_t* immediate) const;
    void lose_messages(std::uint64_t count);
    void unknown();
    void find_coding(std::uint64_t size, const RoceWrite& sample);

    RoceSink& sink_;
    const RoceProtocol protocol_;
    const bool from_start_;
    const bool striped_;
    std::uint64_t message_ = 0;
    std::int64_t due_ = 0;
    bool is_open_ = false;
    std::uint64_t size_ = 0;
    std::int64_t first_ = 0;
    std::uint64_t mtu_ = 0;
    Coding coding_ = Coding::raw;
    std::uint64_t flag_ = 0;
    bool has_gap_ = false;
    std::int64_t gap_ = 0;
    std::vector<RoceWrite> tail_, split_;
    std::uint64_t waiting_bytes_ = 0;
    std::uint64_t split_gap_ = 0;
    bool immediate_due_ = false;
    bool adaptive_ = false;
    bool carries_data_ = false;
    std::uint64_t last_flag_ = 0, flag_message_ = 0;
    bool numbers_lost_ = false;
    bool begun_ = false;
};

// Lines of 16 or 128 bytes and their flags: src/lastgood/mirror/streams/ll.py is the twin.
std::uint64_t data_bytes(Coding coding, std::uint64_t wire_bytes);
std::uint64_t one_flag(Coding coding, const std::uint8_t* payload, std::size_t nbytes);
bool all_flags(Coding coding, const std::uint8_t* payload, std::size_t nbytes, std::uint64_t flag);
// Writes data_bytes(coding, nbytes) bytes.
void decode_lines(Coding coding, const std::uint8_t* payload, std::size_t nbytes, std::uint8_t* data);

}  // namespace lastgood::mirror
