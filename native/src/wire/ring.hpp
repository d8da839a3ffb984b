// One rank's side of a ring all-reduce over two TCP connections, in which every piece of a chunk travels as a gradient
// record. Which chunk goes when, and which sends are marked, is decided by lastgood.wire.ring; this runs it.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "storage/os_io.hpp"
#include "wire/record.hpp"

namespace lastgood {

// Numbers as in records: 1 float32, 2 float64, 3 float16, 4 bfloat16. 16-bit sums and quotients are computed in
// float32 and rounded to nearest even, as torch does on a CPU.
// target[i] = source[i] + target[i]. Throws std::invalid_argument for other types.
void add_elements(std::uint8_t dtype, void* target, const void* source, std::size_t elements);
// target[i] = target[i] / divisor.
void divide_elements(std::uint8_t dtype, void* target, std::size_t elements, std::uint32_t divisor);

// What arrived is not what this rank's own plan expects: the ranks do not reduce the same things in the same order.
class OutOfStep : public std::runtime_error {
    using std::runtime_error::runtime_error;
};

// What arrived is damaged.
class DamagedRecord : public std::runtime_error {
    using std::runtime_error::runtime_error;
};

// Bytes of the buffer that belong at `offset` of a bucket; `bucket` is kNoBucket where they belong to none.
struct RingRange {
    std::uint64_t nbytes;
    std::uint32_t bucket;
    std::uint64_t offset;
};

constexpr std::uint32_t kNoBucket = 0xFFFFFFFF;

// What one rank sends at one step of each loop.
struct RingStep {
    std::uint32_t chunk;
    bool final;   // it carries the sum over all ranks
    bool marked;  // and goes out with the flag
};

enum class Divide : std::uint8_t { no = 0, before = 1, after = 2 };

// How a tensor goes around: the same for each of its iterations.
struct RingPlan {
    std::uint8_t dtype = 1;
    Divide divide = Divide::no;
    std::vector<std::uint64_t> chunk_bytes;  // of all chunks in the buffer's order, `ranks` for each loop
    std::vector<RingRange> ranges;           // of all bytes in the buffer's order
    std::vector<RingStep> own;               // what this rank sends
    std::vector<RingStep> previous;          // what the previous rank sends
    std::uint64_t segment_bytes = 0;         // a record is no longer
};

class Ring {
  public:
    // Takes duplicates of the connected sockets. The names are for messages: rank, host, address.
    Ring(int previous_fd, int next_fd, std::uint64_t job, std::uint32_t epoch, std::uint32_t rank, std::uint32_t ranks,
         std::string previous_name, std::string next_name, double timeout_s);

    // Reduces the tensor at `address` in place. Every failure (OsError, WaitEnded, OutOfStep, DamagedRecord) ends the ring: both connections
    // are shut down, so that the neighbours learn of it, and further calls throw.
    void all_reduce(const RingPlan& plan, std::uintptr_t address, std::uint64_t iteration, const Tick& tick);

    // Tells the next rank that this one sends nothing more for an iteration, and hears it from the previous one.
    void end(std::uint64_t iteration, const Tick& tick);

    // Makes a call that another thread is in fail at once.
    void shut_down();

    std::uint64_t sent_bytes() const { return sent_bytes_.load(); }
    std::uint64_t sent_records() const { return sent_records_.load(); }
    std::uint64_t marked_bytes() const { return marked_bytes_.load(); }

  private:
    struct Piece;
    struct Exchange;

    void run(Exchange& exchange, const Tick& tick);
    bool send_some(Exchange& exchange);
    bool receive_some(Exchange& exchange);
    void wait(Exchange& exchange, const Tick& tick);
    Record record_of(const Exchange& exchange, const Piece& piece, std::uint32_t rank, bool marked) const;

    OwnDescriptor previous_;
    OwnDescriptor next_;
    const std::uint64_t job_;
    const std::uint32_t epoch_;
    const std::uint32_t rank_;
    const std::uint32_t ranks_;
    const std::string previous_name_;
    const std::string next_name_;
    const double timeout_s_;
    std::vector<unsigned char> staging_;
    std::atomic<bool> broken_{false};
    std::atomic<std::uint64_t> sent_bytes_{0};
    std::atomic<std::uint64_t> sent_records_{0};
    std::atomic<std::uint64_t> marked_bytes_{0};
};

}  // namespace lastgood
